// The files that a command writes.
#include "output_files.h"

#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <system_error>

#include "arguments.h"
#include "headway/printable.h"
#include "interrupt.h"
#include "tensor_inputs.h"
#include "text.h"

namespace headway::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* output_group = "Outputs";

bool is_taken(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(fs::symlink_status(path, ignored));  // a dangling link exists too
}

fs::path folder_of(const fs::path& path) { return path.has_parent_path() ? path.parent_path() : fs::path("."); }

void save(const fs::path& path, const std::string& name, ConstTensorView tensor, bool overwrite) {
  switch (format_of(path).value()) {
    case Format::npy: return save_npy(path, tensor, {.overwrite = overwrite});
    case Format::npz: return save_npz(path, {{name, tensor}}, {.overwrite = overwrite});
    case Format::safetensors: return save_safetensors(path, {{name, tensor}}, {}, {.overwrite = overwrite});
  }
}

}  // namespace

bool same_file(const fs::path& a, const fs::path& b) {
  std::error_code ignored;
  // Two names of one existing file (links, case-insensitive folders), or one name spelled in two ways.
  return fs::equivalent(a, b, ignored) ||
         fs::weakly_canonical(fs::absolute(a), ignored) == fs::weakly_canonical(fs::absolute(b), ignored);
}

void check_not_read(const std::string& option, const std::string& path, const std::vector<std::string>& inputs) {
  for (const std::string& input : inputs) {
    const std::optional<TensorName> name = parse_tensor_name(input);
    if (name && same_file(name->path, path)) {
      throw UsageError(text(option, " would overwrite an input file, ", path));
    }
  }
}

void check_target(const fs::path& path, bool overwrite) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) {
    throw Failure(text(path.native(), ": expected a file to write, found a folder"));
  }
  if (!overwrite && is_taken(path)) {
    throw Failure(text(path.native(), " exists; --force replaces it"));
  }
  const fs::path folder = folder_of(path);
  if (!fs::is_directory(folder, ignored)) {
    throw Failure(text(path.native(), ": there is no folder ", folder.native()));
  }
  if (::access(folder.c_str(), W_OK | X_OK) != 0) {
    throw Failure(text(path.native(), ": the folder ", folder.native(), " cannot be written to"));
  }
}

void OutputFiles::add_to(CLI::App& app, const std::string& name, const std::string& help) {
  File& file = files_.emplace_back(File{"-o", name, {}});
  add_text(app, "-o,--output", file.path, help).required().group(output_group);
  add_flag(app, "--force", force_, "Replace existing files").group(output_group);
}

void OutputFiles::add_optional(CLI::App& app, const std::string& option, const std::string& name,
                               const std::string& help) {
  File& file = files_.emplace_back(File{option, name, {}});
  add_text(app, option, file.path, help).group(output_group);
}

std::vector<const OutputFiles::File*> OutputFiles::asked_for() const {
  std::vector<const File*> result;
  for (const File& file : files_) {
    if (file.path) {
      result.push_back(&file);
    }
  }
  return result;
}

std::vector<OutputFiles::Wanted> OutputFiles::wanted() const {
  std::vector<Wanted> result;
  for (const File* file : asked_for()) {
    result.push_back({file->name, *file->path});
  }
  return result;
}

bool OutputFiles::wants(const std::string& name) const {
  const auto asked = asked_for();
  return std::any_of(asked.begin(), asked.end(), [&](const File* file) { return file->name == name; });
}

void OutputFiles::check(const std::vector<std::string>& inputs) const {
  const auto asked = asked_for();
  for (std::size_t i = 0; i < asked.size(); ++i) {
    const File& file = *asked[i];
    if (!format_of(*file.path)) {
      throw UsageError(
          text(file.option, ": expected a file name that ends in .npy, .npz or .safetensors, found ", *file.path));
    }
    for (std::size_t earlier = 0; earlier < i; ++earlier) {
      if (same_file(*asked[earlier]->path, *file.path)) {
        throw UsageError(text(asked[earlier]->option, " and ", file.option, " name the same file, ", *file.path));
      }
    }
    check_not_read(file.option, *file.path, inputs);
  }
  for (const File* file : asked) {
    check_target(*file->path, force_);
  }
}

void OutputFiles::check_type(DType dtype) const {
  for (const File* file : asked_for()) {
    // lse is f32 for bf16 inputs.
    if (dtype == DType::bf16 && file->name != "lse" && format_of(*file->path) != Format::safetensors) {
      const char* format = format_of(*file->path) == Format::npy ? ".npy" : ".npz";
      throw UsageError(text(file->option, ": ", format, " has no bf16, use .safetensors instead of ", *file->path));
    }
  }
}

void OutputFiles::write(const NamedViews& results) const {
  std::vector<fs::path> newly_made;
  finish_files_when_interrupted();
  try {
    for (const File* file : asked_for()) {
      throw_if_interrupted();
      const bool is_new = !is_taken(*file->path);
      save(*file->path, file->name, results.at(file->name), force_);
      if (is_new) {
        newly_made.push_back(*file->path);
      }
    }
  } catch (...) {
    std::error_code ignored;
    for (const fs::path& path : newly_made) {
      fs::remove(path, ignored);
    }
    throw;
  }
}

void OutputFiles::summarize(const NamedViews& results, const std::string& remark) const {
  const char* separator = remark.empty() ? "" : "  ";
  std::string shown_remark = remark;
  for (const File* file : asked_for()) {
    const ConstTensorView& tensor = results.at(file->name);
    std::cout << text(printable(*file->path), "  ", tensor.sizes(), " ", tensor.dtype(), separator, shown_remark, "\n");
    separator = "";
    shown_remark.clear();
  }
}

}  // namespace headway::cli
