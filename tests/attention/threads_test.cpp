// The number of threads: it changes no bit, it must be positive, and several callers may share the library.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "headway/headway.h"

namespace headway::test {
namespace {

// Numbers that look random and repeat.
Tensor numbers(const Dims& sizes, DType dtype, double phase) {
  Tensor result(sizes, DType::f64);
  for (std::int64_t n = 0; n < result.elements(); ++n) {
    result.as<double>()[n] =
        std::sin(phase + 12.9898 * static_cast<double>(n % 9973) * (1 + static_cast<double>(n % 7)));
  }
  return convert(result, dtype);
}

struct Everything {
  Tensor out, lse, dq, dk, dv, dbias, dsinks;
};

// One head of one long sequence, and two short batch items, with options that use every kind of tile.
Everything compute(const Dims& query, const Dims& key, DType dtype) {
  const Tensor q = numbers(query, dtype, 1), k = numbers(key, dtype, 2), v = numbers(key, dtype, 3);
  const Tensor bias = numbers({1, 1, query[2], key[2]}, DType::f32, 4), sinks = numbers({query[1]}, DType::f32, 5);
  const DType lse_type = dtype == DType::f64 ? DType::f64 : DType::f32;
  Everything all{Tensor(query, dtype), Tensor({query[0], query[1], query[2]}, lse_type),
                 Tensor(query, dtype), Tensor(key, dtype),
                 Tensor(key, dtype),   Tensor({1, 1, query[2], key[2]}),
                 Tensor({query[1]})};
  const AttentionOptions options{
      .bias = bias, .causal = Causal::bottom_right, .sinks = sinks, .dropout = 0.2, .seed = 9, .engine = Engine::cpu};
  attention(q, k, v, all.out, options, {.lse = all.lse});
  attention_backward(numbers(query, dtype, 6), q, k, v, all.out, all.lse,
                     {.dq = all.dq, .dk = all.dk, .dv = all.dv, .dbias = all.dbias, .dsinks = all.dsinks}, options);
  return all;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  return std::memcmp(a.data(), b.data(), static_cast<std::size_t>(a.elements()) * size_of(a.dtype())) == 0;
}

void expect_same_bits(const Everything& a, const Everything& b) {
  EXPECT_TRUE(same_bits(a.out, b.out) && same_bits(a.lse, b.lse));
  EXPECT_TRUE(same_bits(a.dq, b.dq) && same_bits(a.dk, b.dk) && same_bits(a.dv, b.dv));
  EXPECT_TRUE(same_bits(a.dbias, b.dbias) && same_bits(a.dsinks, b.dsinks));
}

class Threads : public testing::Test {
 protected:
  ~Threads() override { set_threads(before_); }
  int before_ = get_threads();
};

TEST_F(Threads, however_many_give_the_same_bits) {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    for (const auto& [query, key] : {std::pair<Dims, Dims>{{1, 1, 700, 40}, {1, 1, 1100, 40}},
                                     std::pair<Dims, Dims>{{2, 4, 65, 33}, {2, 2, 70, 33}}}) {
      set_threads(1);
      const Everything alone = compute(query, key, dtype);
      for (int threads : {2, 3, 7, 16}) {
        SCOPED_TRACE(testing::Message() << threads << " threads, " << dtype);
        set_threads(threads);
        expect_same_bits(compute(query, key, dtype), alone);
      }
    }
  }
}

TEST_F(Threads, fewer_than_one_is_an_error_that_says_so) {
  for (int threads : {0, -3}) {
    try {
      set_threads(threads);
      FAIL();
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(std::string(error.what()), "set_threads: expected 1 or more, found " + std::to_string(threads));
    }
  }
}

TEST_F(Threads, of_the_caller_may_call_at_once) {
  set_threads(4);
  const Everything expected = compute({1, 2, 300, 32}, {1, 1, 300, 32}, DType::f32);
  std::vector<std::thread> callers;
  for (int n = 0; n < 16; ++n) {
    callers.emplace_back([&] { expect_same_bits(compute({1, 2, 300, 32}, {1, 1, 300, 32}, DType::f32), expected); });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
}

TEST_F(Threads, are_there_again_after_a_fork) {
  set_threads(3);
  const Everything expected = compute({1, 4, 300, 32}, {1, 4, 300, 32}, DType::f32);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const Everything again = compute({1, 4, 300, 32}, {1, 4, 300, 32}, DType::f32);
    _exit(same_bits(again.out, expected.out) && same_bits(again.dk, expected.dk) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace headway::test
