// headway analyze prints and writes what the library finds.
#include <algorithm>

#include "cli_support.h"

namespace headway::test {
namespace {

class AnalyzeCommand : public CommandTest {};

TEST_F(AnalyzeCommand, writes_every_statistic_and_prints_a_line_for_each_head) {
  const Tensor q = save_random("q.npy", {2, 4, 9, 8}, 1), k = save_random("k.npy", {2, 2, 9, 8}, 2);
  for (const char* name : {"s.npz", "s.safetensors"}) {
    const Finished finished =
        run({"analyze", "q.npy", "k.npy", "--causal", "--top", "3", "--near", "1,none", "--cells", "4", "-o", name});
    ASSERT_EQ(finished.code, 0) << finished.err;
    EXPECT_EQ(std::count(finished.out.begin(), finished.out.end(), '\n'), 1 + 8 + 1) << finished.out;
    EXPECT_NE(finished.out.find("entropy"), std::string::npos);
    const NamedTensors written =
        name == std::string("s.npz") ? load_npz(file(name)) : load_safetensors(file(name)).tensors;
    const Analysis found = analyze(q, k, {.causal = Causal::square}, {.top = 3, .near = {1, {}}, .cells = 4});
    EXPECT_TRUE(same_bits(written.at("entropy"), found.entropy));
    EXPECT_TRUE(same_bits(written.at("near"), found.near));
    EXPECT_TRUE(same_bits(written.at("received"), found.received));
    EXPECT_TRUE(same_bits(written.at("top_keys"), found.top_keys));
    EXPECT_TRUE(same_bits(written.at("map_max"), found.map_max));
    EXPECT_TRUE(same_bits(written.at("similarity"), found.similarity));
  }
}

TEST_F(AnalyzeCommand, splits_heads_and_needs_no_output) {
  save_random("x.npy", {6, 8}, 1);
  const Finished finished = run({"analyze", "x.npy", "x.npy", "--heads", "4"});
  ASSERT_EQ(finished.code, 0) << finished.err;
  EXPECT_EQ(std::count(finished.out.begin(), finished.out.end(), '\n'), 1 + 4);
  EXPECT_EQ(files(), std::set<std::string>{"x.npy"});
}

TEST_F(AnalyzeCommand, programs_get_json) {
  const Tensor x = save_random("x.npy", {2, 6, 8}, 1);
  const Finished finished = run({"analyze", "x.npy", "x.npy", "--json"});
  ASSERT_EQ(finished.code, 0) << finished.err;
  EXPECT_EQ(finished.out.substr(0, 37), "[\n  {\"batch\": 0, \"head\": 0, \"entropy\"");
  EXPECT_NE(finished.out.find("},\n  {\"batch\": 1, \"head\": 0, "), std::string::npos) << finished.out;
  EXPECT_EQ(finished.out.substr(finished.out.size() - 4), "}\n]\n");
}

TEST_F(AnalyzeCommand, says_what_is_wrong) {
  save_random("x.npy", {6, 8}, 1);
  const auto fails = [&](const Arguments& more, int code, const std::string& part) {
    Arguments arguments = {"analyze", "x.npy", "x.npy"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    expect_failure(run(arguments), code, "headway analyze", part);
  };
  fails({"--cells", "513"}, 2, "cells is 513");
  fails({"--top", "-1"}, 2, "top is -1");
  fails({"--near", "1"}, 2, "--near");
  fails({"-o", "s.npy"}, 2, ".npz or .safetensors");
  fails({"-o", "nowhere/s.npz"}, 1, "there is no folder");
  save_npz(file("s.npz"), {});
  fails({"-o", "s.npz"}, 1, "--force");
}

}  // namespace
}  // namespace headway::test
