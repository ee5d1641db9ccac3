// Running the headway command as a user does: in a folder of its own, through a pipe or on a terminal.
#pragma once

#include <gtest/gtest.h>
#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "headway/headway.h"
#include "support/array.h"

namespace headway::test {

using Arguments = std::vector<std::string>;

struct Finished {
  int code = -1;  // -1 when a signal ended the process
  std::string out, err;
};

// A test with an empty folder, in which the command runs and which goes away afterwards.
class CommandTest : public ::testing::Test {
 protected:
  CommandTest();
  ~CommandTest() override;

  std::filesystem::path file(const std::string& name) const { return folder_ / name; }
  std::set<std::string> files() const;

  // Numbers in (-1, 1) as a .npy file.
  Tensor save_random(const std::string& name, const Dims& sizes, unsigned seed, DType dtype = DType::f32) const;

  Finished run(const Arguments& arguments) const;

  // No file that it writes may grow beyond `bytes`: a disk that is full.
  Finished run_with_file_limit(const Arguments& arguments, std::uint64_t bytes) const;

  // Runs `child` in a process of its own, in the folder, and takes what it prints. It does not return.
  Finished run_child(const std::function<void()>& child) const;
  [[noreturn]] static void become_command(const Arguments& arguments);

  // On a terminal, both outputs together in `out`. on_output sees everything so far whenever there is more, with the
  // terminal's other side and the process.
  using OnOutput = std::function<void(const std::string& so_far, int terminal, pid_t process)>;
  Finished run_on_terminal(const Arguments& arguments, const OnOutput& on_output = {}) const;

 private:
  void enter_folder() const;

  std::filesystem::path folder_;
};

Tensor random_tensor(const Dims& sizes, unsigned seed, DType dtype = DType::f32);

// The failure discipline: this code, one line on standard error that starts with `who` and contains `part`, and nothing
// on standard output.
void expect_failure(const Finished& finished, int code, const std::string& who, const std::string& part);

}  // namespace headway::test
