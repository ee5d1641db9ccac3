// A trace as text.
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "headway/headway.h"

namespace headway::test {
namespace {

Trace small(const AttentionOptions& options = {}, const TraceRequest& request = {}) {
  const Tensor x = Tensor::of<float>({2, 4}, {1, 2, 3, 4, 5, 6, 7, 8});
  return trace(x, x, x, options, request);
}

TEST(TraceText, shows_names_formulas_shapes_and_aligned_numbers) {
  TraceRequest request;
  request.heads = 2;
  request.key_tokens = {"the", "cat"};
  const std::string text = to_string(small({.causal = Causal::square}, request));
  EXPECT_NE(text.find(" 5  scores  (2, 2, 2)  S[i,j] = sum over d of Q[i,d] * K[j,d]\n"
                      "    The dot product of a query and a key: large where the two point the same way.\n"
                      "      head 0           head 1\n"
                      "           the  cat         the  cat\n"
                      "      the    5   17    the   25   53\n"
                      "      cat   17   61    cat   53  113\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("      the   3.536    -inf    the  17.678    -inf\n"
                      "      cat  12.021  43.134    cat  37.477  79.903\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("causal top_left, scale 0.707107\n"), std::string::npos);
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
  EXPECT_EQ(text.find(" \n"), std::string::npos);
  std::ostringstream stream;
  stream << small({.causal = Causal::square}, request);
  EXPECT_EQ(stream.str(), text);
}

TEST(TraceText, colour_is_asked_for_and_changes_nothing_else) {
  const Trace found = small();
  std::string coloured = to_string(found, {.colour = true}), plain;
  EXPECT_NE(coloured.find("\x1b[1mscores\x1b[0m"), std::string::npos);
  for (std::size_t at = 0; at < coloured.size(); ++at) {
    if (coloured[at] == '\x1b') {
      at = coloured.find('m', at);
    } else {
      plain += coloured[at];
    }
  }
  // Spaces at the ends of lines may be inside an escape.
  const auto words = [](const std::string& text) {
    std::istringstream stream(text);
    return std::vector<std::string>(std::istream_iterator<std::string>(stream), {});
  };
  EXPECT_EQ(words(plain), words(to_string(found)));
}

TEST(TraceText, long_axes_are_shortened_and_lines_stay_short) {
  const Tensor x({1, 16, 30, 8});
  const std::string text = to_string(trace(x, x, x));
  EXPECT_NE(text.find("k4  ...  k25"), std::string::npos) << text;
  EXPECT_NE(text.find("... and 8 more"), std::string::npos);
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) EXPECT_LE(line.size(), 100u) << line;
  EXPECT_LT(std::count(text.begin(), text.end(), '\n'), 900);
}

TEST(TraceText, of_one_step_is_part_of_the_whole) {
  const Trace found = small();
  const std::string whole = to_string(found);
  for (std::size_t n = 0; n < found.steps.size(); ++n) {
    const std::string text = to_string(found, n);
    EXPECT_NE(text.find(found.steps[n].name), std::string::npos);
    EXPECT_NE(whole.find("\n\n" + text), std::string::npos) << text;
  }
  EXPECT_THROW(to_string(found, found.steps.size()), InvalidArgument);
}

TEST(TraceText, tokens_stay_on_their_line) {
  TraceRequest request;
  request.key_tokens = {"\n\u009b2J", "a very long token indeed"};
  request.title = "\x1b[2J\u202e title";
  const std::string text = to_string(small({}, request));
  EXPECT_EQ(text.find("\\x1b[2J\\u202e title\n"), 0u) << text;
  EXPECT_NE(text.find("\\x0a\\u009b2J"), std::string::npos) << text;
  EXPECT_NE(text.find("a very long~"), std::string::npos) << text;
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
}

// The characters below take two columns each, but for the accent, which takes none.
TEST(TraceText, columns_are_aligned_below_wide_and_empty_tokens) {
  TraceRequest request;
  request.key_tokens = {"\u6771\u4eac", ""};
  const std::string text = to_string(small({}, request));
  EXPECT_NE(text.find("\n      \u6771\u4eac     "), std::string::npos) << text;
  EXPECT_NE(text.find("\n      (empty)  "), std::string::npos) << text;
  request.key_tokens = {"e\u0301t\u00e9", "\U0001f642\U0001f642\U0001f642\U0001f642\U0001f642\U0001f642\U0001f642"};
  const std::string cut = to_string(small({}, request));
  EXPECT_NE(cut.find("\n      e\u0301t\u00e9          "), std::string::npos) << cut;
  EXPECT_NE(cut.find("\n      \U0001f642\U0001f642\U0001f642\U0001f642\U0001f642~   "), std::string::npos) << cut;
}

TEST(TraceText, large_and_small_numbers_keep_their_digits) {
  const Tensor big = Tensor::of<double>({1, 1}, {1e9}), tiny = Tensor::of<double>({1, 1}, {1e-9});
  const std::string text = to_string(trace(big, tiny, tiny));
  EXPECT_NE(text.find("1.000e+09"), std::string::npos) << text;
  EXPECT_NE(text.find("1.000e-09"), std::string::npos) << text;
}

TEST(TraceText, a_step_without_numbers_says_so) {
  const Tensor q({2, 4}), none({0, 4});
  EXPECT_NE(to_string(trace(q, none, none)).find("(no numbers)"), std::string::npos);
}

}  // namespace
}  // namespace headway::test
