// The tokens of keys and queries.
#include "tokens.h"

#include <fstream>

#include "arguments.h"

namespace headway::cli {
namespace {

std::vector<std::string> lines_of(const std::optional<std::string>& path) {
  std::vector<std::string> lines;
  if (!path) {
    return lines;
  }
  std::ifstream file(*path, std::ios::binary);
  if (!file) {
    throw Failure(text(*path, ": cannot be read"));
  }
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && line.back() == '\r') {
      line.pop_back();
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

}  // namespace

void TokenFiles::add_to(CLI::App& app) {
  add_text(app, "--tokens", keys_, "A text file with a token per line for the keys, and for as many queries");
  add_text(app, "--query-tokens", queries_, "The same for the queries");
}

std::vector<std::string> TokenFiles::keys() const { return lines_of(keys_); }
std::vector<std::string> TokenFiles::queries() const { return lines_of(queries_); }

}  // namespace headway::cli
