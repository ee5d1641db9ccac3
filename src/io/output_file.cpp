// Writes a file atomically: its name refers either to the complete new content or to what was there before.
#include "io/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <random>
#include <utility>

namespace headway::io {
namespace {

namespace fs = std::filesystem;

constexpr int create_new = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
constexpr mode_t default_mode = 0666;  // the system subtracts the umask
constexpr const char* exists_already = "the file exists; set overwrite to replace it";

// A symbolic link is followed, as other programs do, not replaced by a file.
fs::path resolved(const fs::path& path) {
  std::error_code ignored;
  if (!fs::is_symlink(path, ignored)) {
    return path;
  }
  const fs::path target = fs::canonical(path, ignored);
  return target.empty() ? path : target;
}

fs::path folder_of(const fs::path& file) { return file.has_parent_path() ? file.parent_path() : fs::path("."); }

// The path under which the system offers an unnamed file.
std::string path_of(const FileDescriptor& file) { return text("/proc/self/fd/", file.number()); }

// Makes the new name survive a power failure. The file is complete either way, and not every file system supports this.
void sync(const fs::path& folder) {
  const FileDescriptor descriptor(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (descriptor.is_open()) {
    ::fsync(descriptor.number());
  }
}

}  // namespace

void refuse_other_format(const char* operation, const fs::path& path, std::string_view extension) {
  static constexpr std::array<std::string_view, 8> formats = {".npy", ".npz", ".safetensors", ".pt",
                                                              ".pth", ".pkl", ".h5",          ".onnx"};
  const std::string found = path.extension();
  if (found != extension && std::find(formats.begin(), formats.end(), found) != formats.end()) {
    throw InvalidArgument(text(operation, ": ", path.native(), ": expected a file name that ends in ", extension));
  }
}

OutputFile::OutputFile(const char* operation, const fs::path& path, bool overwrite, Temporary temporary)
    : context_(operation, path), target_(overwrite ? resolved(path) : path), overwrite_(overwrite) {
  refuse_target();
  create_temporary(temporary);
}

OutputFile::OutputFile(const char* operation, const fs::path& path, bool overwrite, const fs::path& temporary)
    : context_(operation, path), target_(overwrite ? resolved(path) : path), overwrite_(overwrite) {
  refuse_target();
  descriptor_ = FileDescriptor(::open(temporary.c_str(), O_WRONLY | O_CLOEXEC));
  if (!descriptor_.is_open()) {
    context_.fail_system("open its temporary file", errno);
  }
  temporary_ = temporary;
}

OutputFile::~OutputFile() {
  if (!temporary_.empty()) {
    ::unlink(temporary_.c_str());
  }
}

// Checked before the work; publish() checks again, without a race.
void OutputFile::refuse_target() const {
  struct stat status {};
  if (::lstat(target_.c_str(), &status) != 0) {
    return;
  }
  if (S_ISDIR(status.st_mode)) {
    context_.fail_system("write", EISDIR);
  }
  if (!overwrite_) {
    context_.fail_as(EEXIST, exists_already);
  }
  if (!S_ISREG(status.st_mode) && !S_ISLNK(status.st_mode)) {
    context_.fail("expected a regular file to overwrite, found a device, socket or FIFO");
  }
}

// An unnamed file, of which nothing remains if the process dies; where the system has none, a named one.
void OutputFile::create_temporary(Temporary kind) {
  if (kind == Temporary::unnamed) {
    descriptor_ = FileDescriptor(::open(folder_of(target_).c_str(), O_WRONLY | O_TMPFILE | O_CLOEXEC, default_mode));
    if (descriptor_.is_open() && ::access(path_of(descriptor_).c_str(), F_OK) == 0) {
      return;
    }
  }
  claim_temporary([&](const fs::path& name) {
    descriptor_ = FileDescriptor(::open(name.c_str(), create_new, default_mode));
    return descriptor_.is_open();
  });
}

// Calls `create(name)` with new names in the target's folder until one succeeds; that is the temporary file's name from
// then on.
template <class Create>
void OutputFile::claim_temporary(const Create& create) {
  constexpr int attempts = 100;
  std::random_device random;
  for (int attempt = 0; attempt < attempts; ++attempt) {
    // Not derived from the target's name, which may already have the maximum length.
    fs::path candidate = folder_of(target_) / text(".headway-", std::hex, random(), random(), ".tmp");
    if (create(candidate)) {
      temporary_ = std::move(candidate);  // not a copy, which could fail and leave the file behind
      return;
    }
    if (errno != EEXIST) {
      context_.fail_system("create a file in its folder", errno);
    }
  }
  context_.fail_system("create a file in its folder", EEXIST);
}

void OutputFile::write(std::span<const std::byte> bytes) {
  rewrite(position_, bytes);
  position_ += bytes.size();
}

void OutputFile::rewrite(std::uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::pwrite(descriptor_.number(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count <= 0) {
      context_.fail_system("write", count < 0 ? errno : ENOSPC);
    }
    offset += static_cast<std::uint64_t>(count);
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
}

ByteSink OutputFile::sink() {
  return [this](std::span<const std::byte> bytes) { write(bytes); };
}

void OutputFile::resize(std::uint64_t bytes) {
  if (::ftruncate(descriptor_.number(), static_cast<off_t>(bytes)) != 0) {
    context_.fail_system("write", errno);
  }
}

fs::path OutputFile::let_go() {
  if (descriptor_.close() != 0) {
    context_.fail_system("write", errno);
  }
  return std::exchange(temporary_, {});
}

void OutputFile::commit() {
  if (::fsync(descriptor_.number()) != 0) {
    context_.fail_system("write", errno);
  }
  if (temporary_.empty()) {
    const std::string file = path_of(descriptor_);
    claim_temporary([&](const fs::path& name) {
      return ::linkat(AT_FDCWD, file.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) == 0;
    });
  }
  if (descriptor_.close() != 0) {
    context_.fail_system("write", errno);
  }
  const fs::path folder = folder_of(target_);  // while a failure still changes nothing
  publish();
  temporary_.clear();
  sync(folder);
}

void OutputFile::publish() {
  if (overwrite_) {
    rename_to_target();
    return;
  }
  // Linking never replaces a file, as renaming would.
  if (::link(temporary_.c_str(), target_.c_str()) == 0) {
    ::unlink(temporary_.c_str());
    return;
  }
  // Not every file system has hard links. There, an empty file reserves the name, if it is free, and is then replaced.
  const FileDescriptor claim(::open(target_.c_str(), create_new, default_mode));
  if (!claim.is_open() && errno == EEXIST) {
    context_.fail_as(EEXIST, exists_already);
  }
  if (!claim.is_open()) {
    context_.fail_system("write", errno);
  }
  try {
    rename_to_target();
  } catch (const FileError&) {
    ::unlink(target_.c_str());
    throw;
  }
}

void OutputFile::rename_to_target() {
  if (std::rename(temporary_.c_str(), target_.c_str()) != 0) {
    context_.fail_system("write", errno);
  }
}

}  // namespace headway::io
