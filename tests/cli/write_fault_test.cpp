// What the commands leave behind when the disk is full, when the folder may not be written to, and when Ctrl-C comes in
// the middle of writing.
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <fstream>
#include <map>

#include "cli_support.h"
#include "command_line.h"
#include "interrupt.h"
#include "support/system_calls.h"

namespace headway::test {
namespace {

struct Writing {
  Arguments arguments;
  std::set<std::string> written;
};

class WriteFault : public CommandTest {
 protected:
  WriteFault() {
    save_random("x.npy", {2, 3, 4}, 1);
    MultiHeadAttention({.model_dim = 4, .heads = 2}).save(file("layer.safetensors"));
    inputs_ = files();
  }

  // The command in a process of its own that has first called `prepare`; no exec, so that its system calls are watched.
  Finished run_prepared(const Arguments& arguments, const std::function<void()>& prepare) const {
    return run_child([&] {
      prepare();
      std::signal(SIGINT, SIG_DFL);
      cli::catch_interrupts();
      ::_exit(cli::run_command_line(arguments));
    });
  }

  // With a file under each name that would be written.
  void put_old_files(const Writing& writing) const {
    for (const std::string& name : writing.written) {
      std::ofstream(file(name)) << "old";
    }
  }
  void expect_old_files(const Writing& writing) const {
    for (const std::string& name : writing.written) {
      std::ifstream stream(file(name));
      EXPECT_EQ(std::string(std::istreambuf_iterator<char>(stream), {}), "old") << name;
    }
  }

  static Arguments forced(Arguments arguments) {
    arguments.push_back("--force");
    return arguments;
  }

  std::set<std::string> with_inputs(std::set<std::string> names) const {
    names.insert(inputs_.begin(), inputs_.end());
    return names;
  }

  // Every command that writes.
  const std::vector<Writing> commands_ = {
      {{"attend", "x.npy", "x.npy", "x.npy", "-o", "out.npy"}, {"out.npy"}},
      {{"attend", "x.npy", "x.npy", "x.npy", "-o", "out.npy", "--lse", "lse.safetensors"},
       {"out.npy", "lse.safetensors"}},
      {{"analyze", "x.npy", "x.npy", "-o", "s.npz"}, {"s.npz"}},
      {{"layer", "layer.safetensors", "x.npy", "-o", "y.npy"}, {"y.npy"}},
      {{"layer-init", "--model-dim", "4", "--heads", "2", "-o", "new.safetensors"}, {"new.safetensors"}},
      {{"random", "2,3", "-o", "r.npy"}, {"r.npy"}},
      {{"trace", "x.npy", "x.npy", "x.npy", "-o", "t.html"}, {"t.html"}},
      {{"view", "x.npy", "x.npy", "-o", "v.html"}, {"v.html"}},
  };
  std::set<std::string> inputs_;
};

TEST_F(WriteFault, a_full_disk_has_code_1_and_leaves_what_was_there) {
  const auto full = [] { static const WatchedWrites refused([] { static const RefusedCall first(0, ENOSPC); }); };
  for (const Writing& writing : commands_) {
    const std::string& command = writing.arguments.front();
    SCOPED_TRACE(command);
    expect_failure(run_prepared(writing.arguments, full), 1, "headway " + command, "No space left on device");
    EXPECT_EQ(files(), inputs_);
    put_old_files(writing);
    expect_failure(run_prepared(forced(writing.arguments), full), 1, "headway " + command, "No space left on device");
    expect_old_files(writing);
    EXPECT_EQ(files(), with_inputs(writing.written));
    for (const std::string& name : writing.written) {
      std::filesystem::remove(file(name));
    }
  }
}

TEST_F(WriteFault, ctrl_c_while_writing_finishes_every_file_or_leaves_none) {
  const auto interrupted = [] {
    // Twice: the second one would end a process that is not writing.
    static const WatchedWrites signals([] {
      ::raise(SIGINT);
      ::raise(SIGINT);
    });
  };
  for (const Writing& writing : commands_) {
    SCOPED_TRACE(writing.arguments.front());
    const Finished complete = run_prepared(writing.arguments, [] {});
    ASSERT_EQ(complete.code, 0) << complete.err;
    std::map<std::string, std::uintmax_t> sizes;
    for (const std::string& name : writing.written) {
      sizes[name] = std::filesystem::file_size(file(name));
      std::filesystem::remove(file(name));
    }
    const Finished finished = run_prepared(writing.arguments, interrupted);
    if (finished.code == 0) {
      EXPECT_EQ(files(), with_inputs(writing.written));
      for (const std::string& name : writing.written) {
        EXPECT_EQ(std::filesystem::file_size(file(name)), sizes[name]);
        std::filesystem::remove(file(name));
      }
    } else {
      expect_failure(finished, 130, "headway " + writing.arguments.front(), "interrupted");
      EXPECT_EQ(files(), inputs_);
    }
  }
}

TEST_F(WriteFault, a_folder_that_may_not_be_written_to_is_found_before_the_work) {
  ASSERT_EQ(::chmod(file("").c_str(), 0555), 0);
  const auto as_nobody = [] {
    constexpr uid_t nobody = 65534;
    if (::geteuid() == 0 && ::setuid(nobody) != 0) {  // root may write everywhere
      ::_exit(126);
    }
  };
  for (const Writing& writing : commands_) {
    const std::string& command = writing.arguments.front();
    SCOPED_TRACE(command);
    expect_failure(run_prepared(writing.arguments, as_nobody), 1, "headway " + command, "cannot be written to");
  }
  EXPECT_EQ(files(), inputs_);
  ASSERT_EQ(::chmod(file("").c_str(), 0755), 0);
}

}  // namespace
}  // namespace headway::test
