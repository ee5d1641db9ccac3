// System calls of a write that fail, come in pieces or are interrupted when a test says so. An executable that uses
// this links headway_system_calls, which puts these in the place of the C library's.
#pragma once

#include <functional>

namespace headway::test {

// While it lives: call number `refused` of open, pwrite, fsync, close, link, linkat and rename, counted from 0 over all
// of them, fails with `error`.
class RefusedCall {
 public:
  RefusedCall(int refused, int error);
  ~RefusedCall();
  RefusedCall(const RefusedCall&) = delete;
  RefusedCall& operator=(const RefusedCall&) = delete;

  int calls() const;  // so far
};

// While it lives, each pwrite first calls `action`, and writes at most `most` bytes.
class WatchedWrites {
 public:
  explicit WatchedWrites(std::function<void()> action, std::size_t most = static_cast<std::size_t>(-1));
  ~WatchedWrites();
  WatchedWrites(const WatchedWrites&) = delete;
  WatchedWrites& operator=(const WatchedWrites&) = delete;
};

}  // namespace headway::test
