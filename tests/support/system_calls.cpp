#include "system_calls.h"

#include <fcntl.h>
#include <sys/types.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <utility>

namespace headway::test {
namespace {

constexpr int nothing = -1;
int calls_made = 0, refused_call = nothing, refused_with = 0;
std::function<void()> before_write;
std::size_t most_bytes = 0;

bool refuses() {
  const bool refused = calls_made++ == refused_call;
  errno = refused ? refused_with : errno;
  return refused;
}

}  // namespace

RefusedCall::RefusedCall(int refused, int error) {
  calls_made = 0;
  refused_call = refused;
  refused_with = error;
}

RefusedCall::~RefusedCall() { refused_call = nothing; }

int RefusedCall::calls() const { return calls_made; }

WatchedWrites::WatchedWrites(std::function<void()> action, std::size_t most) {
  before_write = std::move(action);
  most_bytes = most;
}

WatchedWrites::~WatchedWrites() { before_write = {}; }

extern "C" {

int __real_open(const char* path, int flags, ...);
int __wrap_open(const char* path, int flags, ...) {
  std::va_list rest;
  va_start(rest, flags);
  const auto mode = va_arg(rest, mode_t);
  va_end(rest);
  return refuses() ? -1 : __real_open(path, flags, mode);
}

ssize_t __real_pwrite(int file, const void* data, std::size_t size, off_t offset);
ssize_t __wrap_pwrite(int file, const void* data, std::size_t size, off_t offset) {
  if (before_write) {
    before_write();
    size = std::min(size, most_bytes);
  }
  return refuses() ? -1 : __real_pwrite(file, data, size, offset);
}

int __real_fsync(int file);
int __wrap_fsync(int file) { return refuses() ? -1 : __real_fsync(file); }

int __real_close(int file);
int __wrap_close(int file) {
  const int result = __real_close(file);  // it is closed, whatever it says
  return refuses() ? -1 : result;
}

int __real_link(const char* from, const char* to);
int __wrap_link(const char* from, const char* to) { return refuses() ? -1 : __real_link(from, to); }

int __real_linkat(int from_folder, const char* from, int to_folder, const char* to, int flags);
int __wrap_linkat(int from_folder, const char* from, int to_folder, const char* to, int flags) {
  return refuses() ? -1 : __real_linkat(from_folder, from, to_folder, to, flags);
}

int __real_rename(const char* from, const char* to);
int __wrap_rename(const char* from, const char* to) { return refuses() ? -1 : __real_rename(from, to); }

}  // extern "C"

}  // namespace headway::test
