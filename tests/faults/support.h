// What the tests of faults share.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <string>

#include "headway/headway.h"

namespace headway::test {

// Numbers that look random and repeat.
inline Tensor numbers(const Dims& sizes, DType dtype = DType::f32, double phase = 1) {
  Tensor result(sizes, DType::f64);
  for (std::int64_t n = 0; n < result.elements(); ++n) {
    result.as<double>()[n] =
        std::sin(phase + 12.9898 * static_cast<double>(n % 9973) * (1 + static_cast<double>(n % 7)));
  }
  return convert(result, dtype);
}

inline std::string bytes_of(const Tensor& tensor) {
  return {static_cast<const char*>(tensor.data()),
          static_cast<std::size_t>(tensor.elements()) * size_of(tensor.dtype())};
}

inline bool same_bits(const Tensor& a, const Tensor& b) { return bytes_of(a) == bytes_of(b); }

class ThreadCount {
 public:
  explicit ThreadCount(int threads) : before_(get_threads()) { set_threads(threads); }
  ~ThreadCount() { set_threads(before_); }
  ThreadCount(const ThreadCount&) = delete;
  ThreadCount& operator=(const ThreadCount&) = delete;

 private:
  int before_;
};

// What a child process that ran the body says: its exit status, or -1 when a signal ended it.
template <class Body>
int in_child(const Body& body) {
  const pid_t child = fork();
  if (child == 0) {
    int status = 127;
    try {
      status = body();
    } catch (...) {
    }
    _exit(status);
  }
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// A folder of this process's own, gone in the end.
class Folder {
 public:
  Folder() : path_(std::filesystem::temp_directory_path() / ("headway-faults-" + std::to_string(getpid()))) {
    std::filesystem::create_directories(path_);
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::permissions(path_, std::filesystem::perms::owner_all, ignored);
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::filesystem::path operator/(const char* name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }

  // How many files are in it, hidden ones too.
  long files() const {
    return std::distance(std::filesystem::directory_iterator(path_), std::filesystem::directory_iterator());
  }

 private:
  std::filesystem::path path_;
};

}  // namespace headway::test
