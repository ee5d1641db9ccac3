// Writes a file atomically: its name refers either to the complete new content or to what was there before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string_view>

#include "io/file_context.h"
#include "io/file_descriptor.h"

namespace headway::io {

// An InvalidArgument for a name that says another format than the one written, by its extension: l.npz for
// .safetensors.
void refuse_other_format(const char* operation, const std::filesystem::path& path, std::string_view extension);

using ByteSink = std::function<void(std::span<const std::byte>)>;

// Bytes go to a temporary file in the same folder, unnamed where the system supports it, which commit() gives its name.
// If the object is destroyed before that, the temporary file is removed and the old file stays.
class OutputFile {
 public:
  enum class Temporary { unnamed, named };  // named: other processes can open it
  OutputFile(const char* operation, const std::filesystem::path& path, bool overwrite,
             Temporary temporary = Temporary::unnamed);
  // A temporary file that another object has made and let go.
  OutputFile(const char* operation, const std::filesystem::path& path, bool overwrite,
             const std::filesystem::path& temporary);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(std::span<const std::byte> bytes);                          // appends
  void rewrite(std::uint64_t offset, std::span<const std::byte> bytes);  // overwrites earlier bytes
  std::uint64_t position() const { return position_; }
  ByteSink sink();
  void resize(std::uint64_t bytes);
  void commit();
  // Keeps the temporary file, which has a name, and returns that.
  std::filesystem::path let_go();
  // From now on the temporary file, which has a name, is another's to remove, also on failure.
  void disown() { temporary_.clear(); }

 private:
  void refuse_target() const;
  void create_temporary(Temporary kind);
  template <class Create>
  void claim_temporary(const Create& create);
  void publish();
  void rename_to_target();

  FileContext context_;
  std::filesystem::path target_;
  bool overwrite_;
  std::filesystem::path temporary_;  // empty when there is none to remove
  FileDescriptor descriptor_;
  std::uint64_t position_ = 0;
};

}  // namespace headway::io
