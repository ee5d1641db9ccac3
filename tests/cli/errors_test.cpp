// An error is one line on standard error and an exit code: 1 for a failure, 2 for an invalid request.
#include <fcntl.h>
#include <unistd.h>

#include <fstream>

#include "cli_support.h"

namespace headway::test {
namespace {

class Errors : public CommandTest {
 protected:
  Errors() {
    save_random("q.npy", {1, 2, 4, 6}, 1);
    save_random("k.npy", {1, 2, 4, 6}, 2);
    inputs_ = files();
  }

  Finished attend(const Arguments& more) const {
    Arguments arguments = {"attend", "q.npy", "k.npy", "k.npy", "-o", "out.npy"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  }

  std::set<std::string> inputs_;
};

TEST_F(Errors, flags_that_make_no_sense_have_code_2) {
  const std::vector<std::pair<Arguments, std::string>> cases = {
      {{"--frobnicate"}, "--frobnicate"},
      {{"--causal", "upper"}, "--causal: expected square, top_left or bottom_right, found upper"},
      {{"--window", "3"}, "--window: expected two sides"},
      {{"--window", "-1,0"}, "none for unlimited, found -1"},
      {{"--window", "a,0"}, "--window: expected a whole number, found a"},
      {{"--valid-lens", "3,,2"}, "--valid-lens: expected a whole number, found nothing"},
      {{"--valid-lens", "2.5"}, "--valid-lens: expected a whole number, found 2.5"},
      {{"--sinks", "1,x"}, "--sinks: expected a number, found x"},
      {{"--scale", "1x"}, "--scale: expected a number, found 1x"},
      {{"--scale", ""}, "--scale: expected a number, found nothing"},
      {{"--scale", "nan"}, "scale is nan"},
      {{"--softcap", "0"}, "softcap is 0"},
      {{"--dropout", "0.5"}, "needs a seed"},
      {{"--dropout", "2", "--seed", "1"}, "dropout is 2"},
      {{"--seed", "-1"}, "--seed: expected a whole number of 0 or more, found -1"},
      {{"--seed", "18446744073709551616"}, "64 bits"},
      {{"--engine", "gpu"}, "--engine: expected automatic, reference, cpu or cuda, found gpu"},
      {{"--valid-lens", "9"}, "valid_lens[0] is 9, expected 0 to 4"},
      {{"--valid-lens", "1,2"}, "valid_lens has shape (2,)"},
      {{"--sinks", "1,2,3"}, "sinks"},
      {{"--mask", "q.npy"}, "mask has type f32, expected bool"},
      {{"--mask", ""}, "expected file.npy"},
      {{"--bias", "bias.txt"}, "expected file.npy, file.npz:name or file.safetensors:name, found bias.txt"},
      {{"extra.npy"}, "extra.npy"},
      {{"-o", "twice.npy"}, "--output"},
  };
  for (const auto& [flags, part] : cases) {
    SCOPED_TRACE(part);
    expect_failure(attend(flags), 2, "headway attend", part);
  }
  EXPECT_EQ(files(), inputs_);
}

TEST_F(Errors, arrays_that_do_not_fit_each_other_have_code_2) {
  save_random("wide.npy", {1, 2, 4, 7}, 1);
  save_random("double.npy", {1, 2, 4, 6}, 1, DType::f64);
  save_npy(file("whole.npy"), Tensor({1, 2, 4, 6}, DType::i64));
  expect_failure(run({"attend", "q.npy", "wide.npy", "wide.npy", "-o", "out.npy"}), 2, "headway attend",
                 "key has head_dim 7, query has 6");
  expect_failure(run({"attend", "q.npy", "double.npy", "double.npy", "-o", "out.npy"}), 2, "headway attend", "f64");
  expect_failure(run({"attend", "whole.npy", "whole.npy", "whole.npy", "-o", "out.npy"}), 2, "headway attend", "i64");
  save_random("short.npy", {1, 2, 3, 6}, 1);
  expect_failure(run({"attend", "short.npy", "k.npy", "k.npy", "-o", "out.npy", "--causal"}), 2, "headway attend",
                 "choose top_left or bottom_right");
}

TEST_F(Errors, files_that_are_not_what_they_should_be_have_code_1) {
  std::ofstream(file("text.npy")) << "not an array";
  std::ofstream(file("text.npz")) << "not an archive";
  std::ofstream(file("empty.safetensors"));
  std::filesystem::create_directory(file("folder.npy"));
  save_npz(file("two.npz"), {{"a", random_tensor({2, 2}, 1)}, {"b", random_tensor({2, 2}, 1)}});
  for (const std::string name : {"missing.npy", "text.npy", "text.npz:a", "empty.safetensors:a", "folder.npy"}) {
    SCOPED_TRACE(name);
    expect_failure(run({"attend", name, "k.npy", "k.npy", "-o", "out.npy"}), 1, "headway attend",
                   name.substr(0, name.find(':')));
  }
  expect_failure(run({"attend", "two.npz:c", "k.npy", "k.npy", "-o", "out.npy"}), 1, "headway attend",
                 "two.npz: expected a tensor named c; it has a, b");
  expect_failure(run({"attend", "two.npz", "k.npy", "k.npy", "-o", "out.npy"}), 2, "headway attend",
                 "expected the name of a tensor after a colon; it has a, b");
}

TEST_F(Errors, an_engine_that_cannot_has_code_1_and_the_reason) {
  const std::vector<Engine> offered = engines();
  for (const Engine engine : {Engine::cpu, Engine::cuda}) {
    if (std::find(offered.begin(), offered.end(), engine) == offered.end()) {
      expect_failure(attend({"--engine", name(engine)}), 1, "headway attend", std::string(name(engine)) + ": ");
    }
  }
}

TEST_F(Errors, memory_that_the_system_refuses_has_code_1) {
  // A width of 0 makes long arrays of no bytes; their weights would have 2^54.
  save_npy(file("long.npy"), Tensor({std::int64_t{1} << 26, 0}));
  const Finished finished = run({"attend", "long.npy", "long.npy", "long.npy", "-o", "out.npy", "--weights", "w.npy"});
  // Not expect_failure: a sanitizer adds a line of its own.
  EXPECT_EQ(finished.code, 1);
  EXPECT_EQ(finished.out, "");
  EXPECT_NE(finished.err.find("headway attend: could not allocate "), std::string::npos) << finished.err;
}

TEST_F(Errors, commands_that_are_not_there_have_code_2) {
  expect_failure(run({}), 2, "headway", "expected a command");
  expect_failure(run({"atend"}), 2, "headway", "there is no command atend; did you mean attend?");
  expect_failure(run({"veiw"}), 2, "headway", "did you mean view?");
  expect_failure(run({"comp"}), 2, "headway", "did you mean completion?");
  expect_failure(run({"zzz"}), 2, "headway", "there is no command zzz (see headway --help)");
  expect_failure(run({""}), 2, "headway", "there is no command");
  expect_failure(run({"attend"}), 2, "headway attend", "required (see headway attend --help)");
}

TEST_F(Errors, an_option_that_is_not_there_has_code_2_and_a_suggestion) {
  const std::string see = " (see headway attend --help)";
  expect_failure(attend({"--casual"}), 2, "headway attend",
                 "there is no option --casual; did you mean --causal?" + see);
  expect_failure(attend({"--sed", "4"}), 2, "headway attend", "there is no option --sed; did you mean --seed?" + see);
  expect_failure(attend({"--valid_lens=3"}), 2, "headway attend",
                 "there is no option --valid_lens; did you mean --valid-lens?" + see);
  expect_failure(attend({"-mask"}), 2, "headway attend", "there is no option -mask; did you mean --mask?" + see);
  expect_failure(attend({"--thread", "2"}), 2, "headway attend",
                 "there is no option --thread; did you mean --threads?" + see);
  expect_failure(attend({"--out", "o.npy"}), 2, "headway attend",
                 "there is no option --out; did you mean --output?" + see);
  expect_failure(attend({"--frobnicate"}), 2, "headway attend", "there is no option --frobnicate" + see);
  expect_failure(attend({"q.npy"}), 2, "headway attend", "expected no further argument, found q.npy" + see);
  expect_failure(run({"--verson"}), 2, "headway",
                 "there is no option --verson; did you mean --version? (see headway --help)");
  expect_failure(run({"--frobnicate"}), 2, "headway", "there is no option --frobnicate (see headway --help)");
  expect_failure(run({"--threads", "2"}), 2, "headway", "expected a command (see headway --help)");
  expect_failure(run({"random", "2,3", "-o"}), 2, "headway random",
                 "--output: expected FILE, found nothing (see headway random --help)");
}

TEST_F(Errors, a_name_that_a_terminal_would_act_on_is_shown_with_escapes_in_one_line) {
  const auto fails = [&](const std::string& name, const std::string& part) {
    expect_failure(run({"attend", name, "k.npy", "k.npy", "-o", "out.npy"}), 1, "headway attend", part);
  };
  fails("a\nb\x1b[2J.npy", "a\\x0ab\\x1b[2J.npy: cannot open");
  fails("a\u009b2J.npy", "a\\u009b2J.npy: cannot open");
  fails("a\u202ey\u2066.npy", "a\\u202ey\\u2066.npy: cannot open");
  fails("a\x9b\xff.npy", "a\\x9b\\xff.npy: cannot open");
  fails("caf\u00e9 \u6ce8.npy", "caf\u00e9 \u6ce8.npy: cannot open");
  expect_failure(run({"at\u009b"}), 2, "headway", "there is no command at\\u009b");
  expect_failure(attend({"--scale", "\u009b1"}), 2, "headway attend", "found \\u009b1");
  save_npz(file("names.npz"), {{"a\u009b2J", random_tensor({2, 2}, 1)}, {"\u202e", random_tensor({2, 2}, 1)}});
  fails("names.npz:c", "it has a\\u009b2J, \\u202e");
  // What succeeds says so on standard output.
  const Finished finished = attend({"--lse", "l\u009b.npy"});
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_NE(finished.out.find("l\\u009b.npy  (1, 2, 4) f32"), std::string::npos) << finished.out;
}

TEST_F(Errors, standard_output_that_takes_nothing_has_code_1) {
  const std::vector<std::pair<Arguments, std::string>> cases = {
      {{"info"}, "headway info"}, {{"--help"}, "headway"}, {{"view", "--help"}, "headway"}};
  for (const auto& entry : cases) {
    const Arguments& arguments = entry.first;
    const Finished finished = run_child([&] {
      ::dup2(::open("/dev/full", O_WRONLY), STDOUT_FILENO);
      become_command(arguments);
    });
    expect_failure(finished, 1, entry.second, "cannot write to standard output");
  }
}

}  // namespace
}  // namespace headway::test
