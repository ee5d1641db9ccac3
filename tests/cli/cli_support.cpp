// Running the headway command as a user does.
#include "cli_support.h"

#include <pty.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <random>

namespace headway::test {
namespace {

std::string read_all(int descriptor, const std::function<void(const std::string&)>& on_more = {}) {
  std::string result;
  char buffer[4096];
  // A terminal answers with an error when its last user has gone: that is its end of file.
  for (ssize_t count; (count = ::read(descriptor, buffer, sizeof buffer)) > 0;) {
    result.append(buffer, static_cast<std::size_t>(count));
    if (on_more) {
      on_more(result);
    }
  }
  return result;
}

int exit_code(pid_t process) {
  int status = 0;
  ::waitpid(process, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

CommandTest::CommandTest() {
  std::string pattern = (std::filesystem::temp_directory_path() / "headway-cli-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) {
    throw std::runtime_error("cannot make a folder for the test");
  }
  folder_ = pattern;
}

CommandTest::~CommandTest() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

std::set<std::string> CommandTest::files() const {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

Tensor CommandTest::save_random(const std::string& name, const Dims& sizes, unsigned seed, DType dtype) const {
  Tensor tensor = random_tensor(sizes, seed, dtype);
  save_npy(file(name), tensor);
  return tensor;
}

void CommandTest::become_command(const Arguments& arguments) {
  // The one who runs the tests may ignore signals; the command is to be tried without that.
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGXFSZ, SIG_IGN);
  std::vector<char*> argv = {const_cast<char*>("headway")};
  for (const std::string& argument : arguments) {
    argv.push_back(const_cast<char*>(argument.c_str()));
  }
  argv.push_back(nullptr);
  ::execv(HEADWAY_COMMAND, argv.data());
  ::_exit(127);
}

Finished CommandTest::run(const Arguments& arguments) const { return run_with_file_limit(arguments, RLIM_INFINITY); }

Finished CommandTest::run_with_file_limit(const Arguments& arguments, std::uint64_t bytes) const {
  return run_child([&] {
    if (bytes != RLIM_INFINITY) {
      const rlimit limit{bytes, bytes};
      ::setrlimit(RLIMIT_FSIZE, &limit);
    }
    become_command(arguments);
  });
}

void CommandTest::enter_folder() const {
  if (::chdir(folder_.c_str()) != 0) {
    ::_exit(127);
  }
}

Finished CommandTest::run_child(const std::function<void()>& child) const {
  int out[2], err[2];
  if (::pipe(out) != 0 || ::pipe(err) != 0) {
    throw std::runtime_error("cannot make a pipe");
  }
  const pid_t process = ::fork();
  if (process == 0) {
    ::dup2(out[1], STDOUT_FILENO);
    ::dup2(err[1], STDERR_FILENO);
    for (const int descriptor : {out[0], out[1], err[0], err[1]}) {
      ::close(descriptor);
    }
    enter_folder();
    child();
    ::_exit(127);
  }
  ::close(out[1]);
  ::close(err[1]);
  // What the command writes on one of them fits a pipe, so reading one after the other cannot block it.
  Finished finished;
  finished.out = read_all(out[0]);
  finished.err = read_all(err[0]);
  ::close(out[0]);
  ::close(err[0]);
  finished.code = exit_code(process);
  return finished;
}

Finished CommandTest::run_on_terminal(const Arguments& arguments, const OnOutput& on_output) const {
  int terminal = -1;
  const pid_t process = ::forkpty(&terminal, nullptr, nullptr, nullptr);
  if (process == 0) {
    enter_folder();
    become_command(arguments);
  }
  Finished finished;
  finished.out = read_all(terminal, [&](const std::string& so_far) {
    if (on_output) {
      on_output(so_far, terminal, process);
    }
  });
  finished.code = exit_code(process);
  ::close(terminal);
  return finished;
}

Tensor random_tensor(const Dims& sizes, unsigned seed, DType dtype) {
  std::mt19937_64 generator(seed);
  Tensor values(sizes, DType::f64);
  std::generate_n(values.as<double>(), values.elements(),
                  [&] { return std::ldexp(static_cast<double>(generator() >> 11), -52) - 1.0; });
  return convert(values, dtype);
}

void expect_failure(const Finished& finished, int code, const std::string& who, const std::string& part) {
  EXPECT_EQ(finished.code, code) << finished.err;
  EXPECT_EQ(finished.out, "");
  EXPECT_EQ(finished.err.find(who + ": "), 0u) << finished.err;
  EXPECT_NE(finished.err.find(part), std::string::npos) << finished.err;
  EXPECT_EQ(std::count(finished.err.begin(), finished.err.end(), '\n'), 1) << finished.err;
  EXPECT_TRUE(finished.err.ends_with('\n'));
}

}  // namespace headway::test
