// Runs a target over files, or over all files of a folder: what a compiler without libFuzzer makes of a target.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <vector>

#include "support.h"

namespace {

std::vector<std::filesystem::path> files_in(const std::filesystem::path& path) {
  if (!std::filesystem::is_directory(path)) {
    return {path};
  }
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

int main(int argc, char** argv) {
  int count = 0;
  for (int n = 1; n < argc; ++n) {
    for (const auto& file : files_in(argv[n])) {
      std::ifstream stream(file, std::ios::binary);
      const std::vector<char> content{std::istreambuf_iterator<char>(stream), {}};
      std::fprintf(stderr, "%s\n", file.c_str());  // before: a crash then shows which
      LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(content.data()), content.size());
      ++count;
    }
  }
  std::fprintf(stderr, "%d inputs\n", count);
  return count == 0 ? 1 : 0;
}
