// Settings from the environment: which instruction set, how many threads. Each is read once by a process, so every case
// is a child process of its own.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "engines/cpu/kernels.h"
#include "headway/headway.h"

namespace headway::test {
namespace {

// What a call on the CPU engine answers in a process with this setting: "ok", or the error's text.
std::string answer_with(const char* variable, const std::string& value) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    std::string answer = "ok";
    setenv(variable, value.c_str(), 1);
    try {
      const Tensor x({1, 1, 2, 4});
      Tensor out({1, 1, 2, 4});
      attention(x, x, x, out, {.engine = Engine::cpu});
      get_threads();  // which so small a call does not ask for
    } catch (const InvalidArgument& error) {
      answer = error.what();
    }
    const auto written = write(ends[1], answer.data(), answer.size());
    _exit(written == static_cast<ssize_t>(answer.size()) ? 0 : 1);
  }
  close(ends[1]);
  std::string answer;
  char buffer[256];
  for (ssize_t got = 0; (got = read(ends[0], buffer, sizeof buffer)) > 0;) answer.append(buffer, got);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0 ? answer : "died";
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
