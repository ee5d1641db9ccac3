// Settings from the environment: which instruction set, how many threads. Each is read once by a process, so every case
// is a child process of its own.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <string>

#include "engines/cpu/kernels.h"
#include "headway/headway.h"
#include "support/inputs.h"

namespace headway::test {
namespace {

// What `call` returns in a process with this setting, or the error's text.
std::string answer_of(const std::function<std::string()>& call, const char* variable, const std::string& value) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    std::string answer;
    setenv(variable, value.c_str(), 1);
    try {
      answer = call();
    } catch (const InvalidArgument& error) {
      answer = error.what();
    }
    const auto written = ::write(ends[1], answer.data(), answer.size());
    _exit(written == static_cast<ssize_t>(answer.size()) ? 0 : 1);
  }
  close(ends[1]);
  std::string answer;
  char buffer[256];
  for (ssize_t got = 0; (got = ::read(ends[0], buffer, sizeof buffer)) > 0;) answer.append(buffer, got);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0 ? answer : "died";
}

std::string answer_with(const char* variable, const std::string& value) {
  const auto small_call = [] {
    const Tensor x({1, 1, 2, 4});
    Tensor out({1, 1, 2, 4});
    attention(x, x, x, out, {.engine = Engine::cpu});
    get_threads();  // which so small a call does not ask for
    return std::string("ok");
  };
  return answer_of(small_call, variable, value);
}

template <class... Tensors>
std::string bytes_of(const Tensors&... tensors) {
  return (std::string(static_cast<const char*>(tensors.data()), tensors.elements() * size_of(tensors.dtype())) + ...);
}

// Forward, backward and a layer in bf16, with sizes beside those of tiles: all bytes that come out.
std::string bytes_of_bf16_calls() {
  std::string bytes;
  for (const Shape& shape : {Shape{1, 2, 1, 70, 90, 33, 17}, Shape{1, 1, 1, 40, 600, 64, 64}})
    for (const Causal causal : {Causal::none, Causal::bottom_right}) {
      const Inputs inputs = random_inputs(shape, DType::bf16);
      const Call call = inputs.call({.causal = causal, .engine = Engine::cpu});
      const Results results = call.run();
      const GradientTensors gradients = call.gradients(results.out, results);
      bytes += bytes_of(results.out, results.lse, gradients.dq, gradients.dk, gradients.dv);
    }
  const Tensor x = random_inputs({1, 1, 1, 50, 1, 96, 1}, DType::bf16).q.clone();
  MultiHeadAttention layer({.model_dim = 96, .heads = 3, .bias = true, .dtype = DType::bf16, .seed = 3});
  const ConstTensorView input = x.view().select(1, 0);
  return bytes + bytes_of(layer.forward(input, input, input));
}

// The tests of the kernels over tiles run on the emulation where there is no AMX, so it has to give what AMX gives.
TEST(Environment, emulated_tiles_give_the_bits_of_real_ones) {
  const std::string emulated = answer_of(bytes_of_bf16_calls, "HEADWAY_ISA", "amx_emulated");
  if (emulated.starts_with("HEADWAY_ISA")) GTEST_SKIP() << emulated;
  const std::string real = answer_of(bytes_of_bf16_calls, "HEADWAY_ISA", "amx");
  if (real.starts_with("HEADWAY_ISA")) GTEST_SKIP() << real;
  EXPECT_NE(real, "died");
  EXPECT_TRUE(real == emulated);
}

TEST(Environment, names_each_instruction_set_that_the_cpu_has) {
  for (const cpu::Kernels* kernels : cpu::available_kernels()) {
    EXPECT_EQ(answer_with("HEADWAY_ISA", kernels->name), "ok");
  }
}

TEST(Environment, naming_an_instruction_set_that_is_not_there_is_an_error_that_says_what_is) {
  for (const std::string name : {"avx9000", "neon avx2", "AVX2"}) {
    const std::string answer = answer_with("HEADWAY_ISA", name);
    EXPECT_NE(answer.find("HEADWAY_ISA: " + name + " was asked for"), std::string::npos) << answer;
    for (const cpu::Kernels* kernels : cpu::available_kernels()) {
      EXPECT_NE(answer.find(kernels->name), std::string::npos) << answer;
    }
  }
}

TEST(Environment, fewer_threads_than_one_are_an_error_that_says_so) {
  for (const std::string value : {"0", "-3", "many", "2x", "99999999999999999999"}) {
    EXPECT_EQ(answer_with("HEADWAY_THREADS", value), "HEADWAY_THREADS: expected 1 or more, found " + value);
  }
  EXPECT_EQ(answer_with("HEADWAY_THREADS", "3"), "ok");
  EXPECT_EQ(answer_with("HEADWAY_THREADS", ""), "ok");
}

}  // namespace
}  // namespace headway::test
