// The tokens of keys and queries.
#include "tokens.h"

#include <fstream>

#include "arguments.h"
#include "text.h"

namespace headway::cli {
namespace {

std::vector<std::string> lines_of(const char* option, const std::optional<std::string>& path,
                                  const ConstTensorView& rows, const char* what) {
  std::vector<std::string> lines;
  if (!path) {
    return lines;
  }
  std::ifstream file(*path, std::ios::binary);
  if (!file) {
    throw Failure(text(option, ": ", *path, ": cannot be read; expected a text file with a token per line"));
  }
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && line.back() == '\r') {
      line.pop_back();
    }
    lines.push_back(std::move(line));
  }
  const auto count = static_cast<std::int64_t>(lines.size());
  if (rows.rank() >= 2 && count != rows.size(-2)) {
    throw UsageError(text(option, ": ", *path, " has ", count, count == 1 ? " line" : " lines", ", expected ",
                          rows.size(-2), ", one for each ", what));
  }
  return lines;
}

}  // namespace

void TokenFiles::add_to(CLI::App& app) {
  add_text(app, "--tokens", keys_, "A text file with a token per line for the keys, and for as many queries");
  add_text(app, "--query-tokens", queries_, "The same for the queries");
}

std::vector<std::string> TokenFiles::keys(const ConstTensorView& rows) const {
  return lines_of("--tokens", keys_, rows, "key");
}

std::vector<std::string> TokenFiles::queries(const ConstTensorView& rows) const {
  return lines_of("--query-tokens", queries_, rows, "query");
}

}  // namespace headway::cli
