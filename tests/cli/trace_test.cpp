// headway trace prints every step, or writes a page.
#include <fstream>

#include "cli_support.h"

namespace headway::test {
namespace {

class TraceCommand : public CommandTest {
 protected:
  TraceCommand() {
    save_npy(file("x.npy"), Tensor::of<float>({2, 4}, {1, 2, 3, 4, 5, 6, 7, 8}));
    std::ofstream(file("t.txt")) << "the\ncat\n";
  }

  std::string text_of(const std::string& name) const {
    std::ifstream stream(file(name));
    return {std::istreambuf_iterator<char>(stream), {}};
  }
};

TEST_F(TraceCommand, prints_the_library_s_text_without_colour_in_a_pipe) {
  const Finished finished = run(
      {"trace", "x.npy", "x.npy", "x.npy", "--heads", "2", "--causal", "--tokens", "t.txt", "--title", "Two words"});
  ASSERT_EQ(finished.code, 0) << finished.err;
  const Tensor x = load_npy(file("x.npy"));
  TraceRequest request;
  request.heads = 2;
  request.key_tokens = {"the", "cat"};
  request.title = "Two words";
  // The command reads one file once; the library sees one tensor.
  EXPECT_EQ(finished.out, to_string(trace(x, x, x, {.causal = Causal::square}, request)));
  EXPECT_EQ(files(), (std::set<std::string>{"t.txt", "x.npy"}));
}

TEST_F(TraceCommand, is_coloured_on_a_terminal) {
  const Finished finished = run_on_terminal({"trace", "x.npy", "x.npy", "x.npy"});
  ASSERT_EQ(finished.code, 0) << finished.out;
  EXPECT_NE(finished.out.find("\x1b[1mscores\x1b[0m"), std::string::npos) << finished.out;
}

TEST_F(TraceCommand, traces_a_layer) {
  ASSERT_EQ(run({"layer-init", "--model-dim", "4", "--heads", "2", "-o", "l.safetensors"}).code, 0);
  const Finished finished = run({"trace", "--layer", "l.safetensors", "x.npy", "--causal"});
  ASSERT_EQ(finished.code, 0) << finished.err;
  const Tensor x = load_npy(file("x.npy"));
  const MultiHeadAttention layer = MultiHeadAttention::load(file("l.safetensors"));
  EXPECT_EQ(finished.out, to_string(trace(layer, x, x, x, {.causal = Causal::square})));
  save_random("memory.npy", {3, 4}, 1);
  const Finished crossed = run({"trace", "--layer", "l.safetensors", "x.npy", "memory.npy"});
  ASSERT_EQ(crossed.code, 0) << crossed.err;
  EXPECT_NE(crossed.out.find("key and value  (3, 4)"), std::string::npos) << crossed.out;
}

TEST_F(TraceCommand, writes_a_page_and_keeps_a_file_that_exists) {
  const Arguments arguments = {"trace", "x.npy", "x.npy", "x.npy", "-o", "a.html"};
  const Finished finished = run(arguments);
  ASSERT_EQ(finished.code, 0) << finished.err;
  EXPECT_EQ(finished.out, "a.html  10 steps\n");
  const std::string page = text_of("a.html");
  EXPECT_EQ(page.rfind("<!doctype html>", 0), 0u);
  expect_failure(run(arguments), 1, "headway trace", "a.html exists; --force replaces it");
  EXPECT_EQ(text_of("a.html"), page);
  Arguments forced = arguments;
  forced.push_back("--force");
  EXPECT_EQ(run(forced).code, 0);
  EXPECT_NE(text_of("a.html"), page);  // at least its nonce is new
}

TEST_F(TraceCommand, says_what_is_wrong) {
  save_random("long.npy", {200, 4}, 1);
  save_npy(file("whole.npy"), Tensor::of<std::int64_t>({2, 2}, {1, 2, 3, 4}));
  const auto fails = [&](Arguments arguments, int code, const std::string& part) {
    arguments.insert(arguments.begin(), "trace");
    expect_failure(run(arguments), code, "headway trace", part);
  };
  fails({}, 2, "expected query, key and value, or --layer");
  fails({"x.npy", "x.npy"}, 2, "expected query, key and value, or --layer");
  fails({"long.npy", "long.npy", "long.npy"}, 2, "at most 16384 numbers");
  fails({"whole.npy", "whole.npy", "whole.npy"}, 2, "query has type i64");
  fails({"x.npy", "x.npy", "x.npy", "-o", "a.txt"}, 2, "ends in .html");
  fails({"x.npy", "x.npy", "x.npy", "-o", "none/a.html"}, 1, "there is no folder");
  fails({"x.npy", "x.npy", "x.npy", "--heads", "3"}, 2, "multiple of its 3 heads");
  fails({"x.npy", "x.npy", "x.npy", "--kv-heads", "2"}, 2, "--kv-heads needs --heads");
  fails({"x.npy", "x.npy", "x.npy", "--tokens", "none.txt"}, 1,
        "--tokens: none.txt: cannot be read; expected a text file with a token per line");
  fails({"--layer", "none.safetensors", "x.npy"}, 1, "none.safetensors");
  fails({"--layer", "none.safetensors"}, 2, "expected the layer's input");
  fails({"--layer", "none.safetensors", "x.npy", "--heads", "2"}, 2, "--heads goes without --layer");
}

}  // namespace
}  // namespace headway::test
