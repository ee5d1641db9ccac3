// The files that a command writes. Everything that can be checked before the work is checked before it; nothing is
// written until the work is done.
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
  // Adds -o (and --force) for the result called `name` in a .npz or .safetensors file.
  void add_to(CLI::App& app, const std::string& name, const std::string& help);

  // Adds an option for another file, which is written if the option is given.
  void add_optional(CLI::App& app, const std::string& option, const std::string& name, const std::string& help);

  bool wants(const std::string& name) const;

  // Before the work: checks the names and whether their folders can be written. `inputs` as the command line spells
  // them.
  void check(const std::vector<std::string>& inputs) const;
  // The checks that need the type of the inputs.
  void check_type(DType dtype) const;

  // Writes all files or none: if one fails, those that this call has newly made are removed. A file that --force
  // replaced stays replaced.
  void write(const NamedViews& results) const;

  struct Wanted {
    std::string name, path;
  };
  std::vector<Wanted> wanted() const;
  bool replaces() const { return force_; }

  // Prints one line per file, with `remark` after the first.
  void summarize(const NamedViews& results, const std::string& remark) const;

 private:
  struct File {
    std::string option;  // its name in messages
    std::string name;
    std::optional<std::string> path;  // if asked for
  };

  std::vector<const File*> asked_for() const;

  std::deque<File> files_;  // CLI11 keeps references to what is in it
  bool force_ = false;
};

// Throws Failure for an existing file without --force, or a folder that cannot be written.
void check_target(const std::filesystem::path& path, bool overwrite);

// Throws UsageError if `path`, which `option` says to write, is one of the files that `inputs` name.
void check_not_read(const std::string& option, const std::string& path, const std::vector<std::string>& inputs);

bool same_file(const std::filesystem::path& a, const std::filesystem::path& b);

}  // namespace headway::cli
