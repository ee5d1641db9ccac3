// What the tests of tensor files share: a folder to write in, files from bytes, tensors of every type, and a bound on
// memory.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "headway/io.h"

namespace headway {

// A folder that goes away with its files.
class TestFolder {
 public:
  TestFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "headway_io_XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) {
      throw FileError("could not make a folder for the test");
    }
    path_ = pattern;
  }
  ~TestFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;

  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

  std::size_t files() const {
    const std::filesystem::directory_iterator entries(path_);
    return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
  }

 private:
  std::filesystem::path path_;
};

inline std::filesystem::path put(const std::filesystem::path& path, const std::string& content) {
  std::filesystem::remove(path);  // some file systems wait for the disk when a file is emptied and written again
  std::ofstream(path, std::ios::binary) << content;
  return path;
}

template <std::size_t count>
std::filesystem::path put(const std::filesystem::path& path, const unsigned char (&content)[count]) {
  return put(path, std::string(reinterpret_cast<const char*>(content), count));
}

inline std::string content_of(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

template <class Integer>
std::string little_endian(Integer value) {
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

template <class Integer>
void poke(std::string& content, std::size_t offset, Integer value) {
  content.replace(offset, sizeof value, little_endian(value));
}

// Runs `action`, which must throw a FileError whose text has all these parts.
template <class Action>
void expect_file_error(const Action& action, std::initializer_list<std::string> parts) {
  try {
    action();
    ADD_FAILURE() << "no error";
  } catch (const FileError& error) {
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << "\"" << part << "\" in: " << error.what();
    }
  }
}

inline bool same(ConstTensorView a, ConstTensorView b) {
  if (a.dtype() != b.dtype() || a.sizes() != b.sizes()) {
    return false;
  }
  const Tensor left = convert(a, a.dtype());
  const Tensor right = convert(b, b.dtype());
  return std::memcmp(left.data(), right.data(), static_cast<std::size_t>(a.elements()) * size_of(a.dtype())) == 0;
}

inline const std::vector<DType>& all_types() {
  static const std::vector<DType> types{DType::f32, DType::f64, DType::bf16, DType::f16,
                                        DType::b8,  DType::i32, DType::i64};
  return types;
}

// Random bits: NaNs, denormals and bools that are neither 0 nor 1 included.
inline Tensor random_bits(const Dims& sizes, DType dtype) {
  Tensor result(sizes, dtype);
  std::mt19937 random(7);
  auto* bytes = static_cast<unsigned char*>(result.data());
  for (std::size_t i = 0; i < static_cast<std::size_t>(result.elements()) * size_of(dtype); ++i) {
    bytes[i] = static_cast<unsigned char>(random());
  }
  return result;
}

// While it lives, memory for about 64 MiB more can be had: a reader that believes a huge claim fails in another way
// than with a FileError. A build with the address sanitizer needs the whole address space; there the sanitizer is told
// the largest allocation (mutation_test.cpp).
class SmallMemory {
 public:
  SmallMemory() {
    ::getrlimit(RLIMIT_AS, &before_);
#ifndef __SANITIZE_ADDRESS__
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    rlimit limit = before_;
    limit.rlim_cur = pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)) + (std::size_t{64} << 20);
    ::setrlimit(RLIMIT_AS, &limit);
#endif
  }
  ~SmallMemory() { ::setrlimit(RLIMIT_AS, &before_); }
  SmallMemory(const SmallMemory&) = delete;
  SmallMemory& operator=(const SmallMemory&) = delete;

 private:
  rlimit before_{};
};

}  // namespace headway
