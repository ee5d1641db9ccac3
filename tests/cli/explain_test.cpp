// headway explain and headway info.
#include "cli_support.h"

namespace headway::test {
namespace {

class Explain : public CommandTest {};

TEST_F(Explain, prints_the_librarys_plan) {
  const Tensor q = save_random("q.npy", {2, 4, 5, 8}, 1);
  const Tensor k = save_random("k.npy", {2, 2, 6, 8}, 2);
  const Finished finished = run({"explain", "q.npy", "k.npy", "k.npy", "--causal", "bottom_right"});
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_EQ(finished.out, to_string(explain(q, k, k, {.causal = Causal::bottom_right})));
  const Finished backward = run({"explain", "q.npy", "k.npy", "k.npy", "--backward"});
  EXPECT_EQ(backward.out, to_string(explain(q, k, k, {}, {.backward = true})));
  EXPECT_NE(backward.out.find("attention_backward"), std::string::npos);
  const Finished more = run({"explain", "q.npy", "k.npy", "k.npy", "--weights", "--lse"});
  EXPECT_EQ(more.out, to_string(explain(q, k, k, {}, {.lse = true, .weights = true})));
}

TEST_F(Explain, a_shape_needs_no_files_and_no_memory) {
  const Finished finished = run({"explain", "--shape", "1,32,1000000,1000000,128,64", "--kv-heads", "8", "--dtype",
                                 "bf16", "--causal", "--window", "128,0"});
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_NE(finished.out.find("query (1, 32, 1000000, 128), key (1, 8, 1000000, 128), value (1, 8, 1000000, 64), bf16"),
            std::string::npos)
      << finished.out;
  EXPECT_NE(finished.out.find("window (128, 0)"), std::string::npos);
}

TEST_F(Explain, a_shape_and_files_describe_the_same_plan) {
  save_random("x.npy", {2, 3, 5, 8}, 1, DType::f64);
  EXPECT_EQ(run({"explain", "--shape", "2,3,5,5,8", "--dtype", "f64", "--causal"}).out,
            run({"explain", "x.npy", "x.npy", "x.npy", "--causal"}).out);
  save_random("joined.npy", {2, 5, 24}, 1, DType::f64);
  EXPECT_EQ(run({"explain", "--shape", "2,3,5,5,8", "--dtype", "f64"}).out,
            run({"explain", "joined.npy", "joined.npy", "joined.npy", "--heads", "3"}).out);
}

TEST_F(Explain, asks_for_either_files_or_a_shape) {
  save_random("x.npy", {2, 3, 5, 8}, 1);
  expect_failure(run({"explain"}), 2, "headway explain", "expected query, key and value, or --shape");
  expect_failure(run({"explain", "x.npy", "x.npy"}), 2, "headway explain", "expected query, key and value");
  expect_failure(run({"explain", "x.npy", "x.npy", "x.npy", "--shape", "1,1,1,1,1"}), 2, "headway explain", "both");
  expect_failure(run({"explain", "x.npy", "x.npy", "x.npy", "--dtype", "f32"}), 2, "headway explain", "--dtype");
  expect_failure(run({"explain", "--shape", "1,2,3,4,5", "--heads", "2"}), 2, "headway explain", "--heads");
  expect_failure(run({"explain", "--shape", "1,2,3"}), 2, "headway explain", "--shape: expected 5 or 6 numbers");
  expect_failure(run({"explain", "--shape", "1,2,3,4,-5"}), 2, "headway explain", "-5");
}

TEST_F(Explain, info_lists_version_engines_formats_and_threads) {
  const Finished finished = run({"info"});
  EXPECT_EQ(finished.code, 0);
  EXPECT_EQ(finished.err, "");
  for (const char* part : {HEADWAY_VERSION, "cuda", "cpu", "reference", ".npy", ".npz", ".safetensors", "threads"}) {
    EXPECT_NE(finished.out.find(part), std::string::npos) << part;
  }
  const bool all_offered = engines().size() == 3;
  EXPECT_EQ(finished.out.find("not offered: ") == std::string::npos, all_offered) << finished.out;
}

TEST_F(Explain, info_of_a_file_lists_its_tensors) {
  const Tensor x = save_random("x.npy", {2, 3}, 1), y({4}, DType::f64);
  save_npz(file("xy.npz"), {{"x", x}, {"longer", y}});
  EXPECT_EQ(run({"info", "x.npy"}).out, "f32 (2, 3)\n");
  EXPECT_EQ(run({"info", "xy.npz"}).out, "longer  f64 (4,)\nx       f32 (2, 3)\n");
  EXPECT_EQ(run({"info", "xy.npz", "--json"}).out,
            "{\n  \"longer\": {\"dtype\": \"f64\", \"shape\": [4]},\n  \"x\": {\"dtype\": \"f32\", \"shape\": [2, "
            "3]}\n}\n");
  expect_failure(run({"info", "x.txt"}), 2, "headway info", "expected a .npy, .npz or .safetensors file, found x.txt");
  expect_failure(run({"info", "none.npy"}), 1, "headway info", "none.npy");
}

TEST_F(Explain, programs_get_json) {
  const Finished plan = run({"explain", "--shape", "1,2,3,4,5", "--json"});
  EXPECT_EQ(plan.code, 0);
  EXPECT_NE(plan.out.find("\"operation\": \"attention\""), std::string::npos) << plan.out;
  EXPECT_NE(plan.out.find("\"pairs\": 24,"), std::string::npos) << plan.out;
  EXPECT_NE(plan.out.find("\"query\": [1, 2, 3, 5],"), std::string::npos) << plan.out;
  EXPECT_NE(plan.out.find("\"dtype\": \"f32\","), std::string::npos) << plan.out;
}

TEST_F(Explain, info_as_json_has_numbers_and_truth_values) {
  const std::string found = run({"info", "--json", "--threads", "1"}).out;
  for (const std::string part : {"\"version\": \"" HEADWAY_VERSION "\"",
                                 "\"reference\": {\"offered\": true, \"details\": ", "\".npy\": {\"offered\": true, ",
                                 "\"threads\": 1,", "\"processors\": "}) {
    EXPECT_NE(found.find(part), std::string::npos) << part << " in " << found;
  }
}

TEST_F(Explain, help_is_a_command_too) {
  EXPECT_EQ(run({"help"}).out, run({"--help"}).out);
  EXPECT_EQ(run({"help", "attend"}).out, run({"attend", "--help"}).out);
  EXPECT_NE(run({"attend", "--help"}).out, run({"--help"}).out);
}

TEST_F(Explain, threads_are_as_many_as_asked_for_before_or_after_the_command) {
  for (const Arguments& arguments : {Arguments{"--threads", "1", "info"}, Arguments{"info", "--threads", "1"}}) {
    EXPECT_NE(run(arguments).out.find("threads   1 "), std::string::npos) << run(arguments).out << run(arguments).err;
  }
  expect_failure(run({"info", "--threads", "0"}), 2, "headway info", "--threads: expected 1 or more, found 0");
}

TEST_F(Explain, completion_is_a_script_that_knows_every_command) {
  for (const char* shell : {"bash", "zsh"}) {
    const Finished finished = run({"completion", shell});
    EXPECT_EQ(finished.code, 0);
    for (const char* part : {"attend", "layer-init", "--valid-lens", "complete -o default -F _headway headway"}) {
      EXPECT_NE(finished.out.find(part), std::string::npos) << part << " in " << finished.out;
    }
  }
  expect_failure(run({"completion", "fish"}), 2, "headway completion", "expected bash or zsh, found fish");
}

TEST_F(Explain, each_command_has_help_with_examples) {
  for (const char* command : {"attend", "layer", "layer-init", "explain", "random"}) {
    const Finished finished = run({command, "--help"});
    EXPECT_EQ(finished.code, 0);
    EXPECT_EQ(finished.err, "");
    EXPECT_NE(finished.out.find("Examples:\n  headway " + std::string(command)), std::string::npos) << finished.out;
  }
  EXPECT_EQ(run({"--help"}).code, 0);
  EXPECT_EQ(run({"--version"}).out, std::string("headway ") + version + "\n");
}

}  // namespace
}  // namespace headway::test
