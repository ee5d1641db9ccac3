// The files that a command writes. Everything that can be checked before the work is checked then; nothing is written
// before the work is done.
#pragma once

#include <deque>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "headway/io.h"

namespace CLI {
class App;
}

namespace headway::cli {

class OutputFiles {
 public:
  // Adds -o (and --force) for the result called `name` in a .safetensors file.
  void add_to(CLI::App& app, const std::string& name, const std::string& help);

  // Adds an option for one more file, which is written when asked for.
  void add_optional(CLI::App& app, const std::string& option, const std::string& name, const std::string& help);

  bool wants(const std::string& name) const;

  // Before the work: names that make sense, and folders that take them. `inputs` as the command line spells them.
  void check(const std::vector<std::string>& inputs) const;
  // ... and once the inputs' type is known.
  void check_type(DType dtype) const;

  // All files or none: when one fails, those that this call has newly made go again. A file that --force replaced
  // stays replaced.
  void write(const NamedViews& results) const;

  // One line a file, the first one with `remark` behind it.
  void summarize(const NamedViews& results, const std::string& remark) const;

 private:
  struct File {
    std::string option;  // as messages call it
    std::string name;
    std::optional<std::string> path;  // when asked for
  };

  std::vector<const File*> asked_for() const;

  std::deque<File> files_;  // CLI11 keeps references to what is in it
  bool force_ = false;
};

// An existing file without --force, or a folder that takes no new file: Failure.
void check_target(const std::filesystem::path& path, bool overwrite);

// UsageError when `path`, which `option` says to write, is one of the files that `inputs` name.
void check_not_read(const std::string& option, const std::string& path, const std::vector<std::string>& inputs);

bool same_file(const std::filesystem::path& a, const std::filesystem::path& b);

}  // namespace headway::cli
