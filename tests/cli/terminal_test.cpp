// Progress on a terminal, silence in a pipe, and what an interrupt leaves behind.
#include <unistd.h>

#include <csignal>

#include "cli_support.h"

namespace headway::test {
namespace {

class Terminal : public CommandTest {
 protected:
  // length^2 pairs on the slowest engine, which does some 10^7 a second.
  Arguments long_work(std::int64_t length) const {
    save_random("x.npy", {length, 4}, 1);
    return {"attend", "x.npy", "x.npy", "x.npy", "-o", "out.npy", "--lse", "lse.npy", "--engine", "reference"};
  }
  static constexpr std::int64_t about_a_second = 8000;
  static constexpr std::int64_t many_minutes = 120000;
};

TEST_F(Terminal, long_work_shows_one_line_of_progress_and_wipes_it) {
  const Finished finished = run_on_terminal(long_work(about_a_second));
  ASSERT_EQ(finished.code, 0) << finished.out;
  EXPECT_NE(finished.out.find(" %"), std::string::npos) << finished.out;
  EXPECT_NE(finished.out.find(" s left"), std::string::npos) << finished.out;
  // Up to the summary there is no line break; the line goes away before it.
  const std::size_t summary = finished.out.find("out.npy  (8000, 4) f32");
  ASSERT_NE(summary, std::string::npos);
  EXPECT_EQ(finished.out.substr(0, summary).find('\n'), std::string::npos);
  EXPECT_EQ(finished.out[summary - 1], '\r');
}

TEST_F(Terminal, long_work_is_quiet_in_a_pipe) {
  const Finished finished = run(long_work(about_a_second));
  EXPECT_EQ(finished.code, 0);
  EXPECT_EQ(finished.err, "");
  EXPECT_EQ(finished.out.find("out.npy  "), 0u);
}

TEST_F(Terminal, short_work_shows_no_progress) {
  const Finished finished = run_on_terminal(long_work(10));
  EXPECT_EQ(finished.code, 0);
  EXPECT_EQ(finished.out.find("out.npy  "), 0u) << finished.out;
}

TEST_F(Terminal, ctrl_c_stops_the_work_and_leaves_nothing_behind) {
  bool pressed = false;
  const Finished finished =
      run_on_terminal(long_work(many_minutes), [&](const std::string& so_far, int terminal, pid_t) {
        if (!pressed && so_far.find(" %") != std::string::npos) {
          pressed = ::write(terminal, "\x03", 1) == 1;
        }
      });
  EXPECT_TRUE(pressed);
  EXPECT_EQ(finished.code, 130);
  EXPECT_NE(finished.out.find("headway attend: interrupted"), std::string::npos) << finished.out;
  EXPECT_EQ(finished.out.find("out.npy"), std::string::npos);
  EXPECT_EQ(files(), std::set<std::string>{"x.npy"});
}

TEST_F(Terminal, an_interrupt_keeps_the_file_that_force_would_have_replaced) {
  Arguments arguments = long_work(many_minutes);
  arguments.push_back("--force");
  const Tensor old = save_random("out.npy", {3}, 7);
  bool sent = false;
  const Finished finished = run_on_terminal(arguments, [&](const std::string& so_far, int, pid_t process) {
    if (!sent && so_far.find(" %") != std::string::npos) {
      sent = ::kill(process, SIGTERM) == 0;
    }
  });
  EXPECT_EQ(finished.code, 128 + SIGTERM);
  EXPECT_TRUE(same_bits(load_npy(file("out.npy")), old));
  EXPECT_EQ(files(), (std::set<std::string>{"out.npy", "x.npy"}));
}

}  // namespace
}  // namespace headway::test
