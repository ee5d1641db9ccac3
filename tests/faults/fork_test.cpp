// A process that forks in the middle of a call: the child may call the library, and the parent's call is unaffected.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <optional>
#include <thread>
#include <vector>

#include "support.h"

namespace headway::test {
namespace {

constexpr unsigned hang_seconds = 60;  // after which a signal ends a child

struct Pass {
  Tensor q = numbers({1, 4, 300, 32}), one = numbers({1, 4, 1, 32}), expected{q.sizes()}, expected_one{one.sizes()};

  Pass() { run(expected, expected_one); }

  void run(Tensor& out, Tensor& out_one, const Progress& progress = {}) const {
    attention(q, q, q, out, {.progress = progress});
    attention(one, q, q, out_one);
  }

  bool is_right() const {
    Tensor out(q.sizes()), out_one(one.sizes());
    run(out, out_one);
    return same_bits(out, expected) && same_bits(out_one, expected_one);
  }
};

TEST(Forks, in_a_callback_leave_both_processes_a_working_library) {
  const ThreadCount three(3);
  const Pass pass;
  std::vector<int> children;
  Tensor out(pass.q.sizes()), out_one(pass.one.sizes());
  pass.run(out, out_one, [&](double) {
    children.push_back(in_child([&] {
      alarm(hang_seconds);
      return pass.is_right() ? 0 : 1;
    }));
    return true;
  });
  ASSERT_FALSE(children.empty());
  for (const int status : children) {
    EXPECT_EQ(status, 0);
  }
  EXPECT_TRUE(same_bits(out, pass.expected) && same_bits(out_one, pass.expected_one));
  EXPECT_TRUE(pass.is_right());
}

// The tasks that the parent's threads took are not done in the child: its call ends with an error, or right.
TEST(Forks, end_the_childs_copy_of_the_call_when_it_comes_back_to_it) {
  const ThreadCount three(3);
  const Pass pass;
  const pid_t parent = getpid();
  std::optional<pid_t> child;
  Tensor out(pass.q.sizes()), out_one(pass.one.sizes());
  int found = 0;
  try {
    pass.run(out, out_one, [&](double) {
      if (!child && getpid() == parent) {
        child = fork();
        if (*child == 0) {
          alarm(hang_seconds);
        }
      }
      return true;
    });
    found = same_bits(out, pass.expected) ? 0 : 1;
  } catch (const Unsupported&) {
    found = 0;
  } catch (...) {
    found = 2;
  }
  if (getpid() != parent) {
    _exit(found == 0 && pass.is_right() ? 0 : 1);
  }
  EXPECT_EQ(found, 0);
  ASSERT_TRUE(child && *child > 0);
  int status = 0;
  ASSERT_EQ(waitpid(*child, &status, 0), *child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(Forks, while_another_thread_calls_leave_the_child_a_working_library) {
  const ThreadCount three(3);
  const Pass pass;
  std::atomic<bool> ends{false}, right{true};
  std::thread caller([&] {
    while (!ends) {
      right = right && pass.is_right();
    }
  });
  for (int n = 0; n < 10; ++n) {
    EXPECT_EQ(in_child([&] {
                alarm(hang_seconds);
                return pass.is_right() ? 0 : 1;
              }),
              0);
  }
  ends = true;
  caller.join();
  EXPECT_TRUE(right);
}

}  // namespace
}  // namespace headway::test
