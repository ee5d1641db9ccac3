// The generator and the fuzzer themselves, and a fixed seed of it on every engine and instruction set.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <stdexcept>

#include "fuzz/runner.h"

namespace headway::test::fuzz {
namespace {

TEST(Cases, are_lines_of_text_that_give_the_same_case_again) {
  Random random(1);
  std::set<std::string> lines;
  for (int n = 0; n < 2000; ++n) {
    const Case drawn = draw(random);
    const std::string line = line_of(drawn);
    EXPECT_EQ(line_of(case_of(line)), line);
    EXPECT_EQ(line_of(legal(drawn)), line);
    lines.insert(line);
  }
  EXPECT_EQ(lines.size(), 2000u);
}

TEST(Cases, name_the_word_that_they_do_not_understand) {
  for (const char* line : {"sq=3 colour=red", "type=f8", "mask=checkered", "plants=nowhere:nan", "sq"})
    EXPECT_THROW(case_of(line), std::invalid_argument) << line;
}

TEST(Cases, become_simpler_in_steps_that_end) {
  Random random(2);
  for (int n = 0; n < 50; ++n) {
    const Case drawn = draw(random);
    for (const Case& one : simpler(drawn)) {
      EXPECT_NE(line_of(one), line_of(drawn));
      EXPECT_LE(cost(one), cost(drawn));
    }
    // The first of the simpler cases again and again, as when everything fails.
    Case smallest = shrunk(
        drawn, [](const Case&) { return true; }, 60);
    EXPECT_TRUE(simpler(smallest).empty()) << line_of(smallest);
  }
}

TEST(Cases, shrink_to_what_the_failure_needs) {
  const Case drawn = case_of(
      "type=bf16 b=3 h=4 hkv=2 sq=100 sk=300 d=64 dv=80 mask=tiles bias=random causal=top_left dropout=0.3 sinks=f64 "
      "q_layout=gaps plants=key:nan,value:inf v=wide seed=99");
  const Case smallest = shrunk(
      drawn, [](const Case& one) { return one.sk >= 65 && one.mask == Pattern::tiles && one.type == DType::bf16; }, 60);
  EXPECT_EQ(line_of(smallest), "type=bf16 sk=65 mask=tiles");
}

// The checks of a case whose numbers changed after the oracle saw them, as a wrong kernel would.
std::string check_that_fails(const std::string& line, const std::function<void(Materials&)>& change) {
  Prepared prepared(case_of(line));
  change(prepared.materials);
  const auto failure = check(prepared, Engine::reference);
  return failure ? failure->check : "";
}

void overwrite(ConstTensorView view, const Dims& index, double value) {
  set(TensorView(const_cast<void*>(view.data()), view.dtype(), view.sizes(), view.strides()), index, value);
}

TEST(Checks, find_what_is_wrong) {
  const std::string line = "b=2 h=2 sq=5 sk=7 d=8 dv=6";
  EXPECT_EQ(check_that_fails(line, [](Materials&) {}), "");
  EXPECT_EQ(check_that_fails(line, [](Materials& one) { overwrite(one.call.v, {1, 0, 6, 5}, 3); }), "out");
  EXPECT_EQ(check_that_fails(line, [](Materials& one) { overwrite(one.call.v, {1, 0, 6, 5}, NAN); }), "out");
  EXPECT_EQ(check_that_fails(line, [](Materials& one) { overwrite(one.grad_out, {0, 1, 4, 5}, 3); }), "dq");
  EXPECT_EQ(check_that_fails(line + " causal=top_left", [](Materials& one) { one.call.options.causal = Causal::none; }),
            "out");
  EXPECT_EQ(check_that_fails(line + " dropout=0.5", [](Materials& one) { *one.call.options.seed += 1; }), "out");
}

TEST(Checks, take_what_the_contract_allows) {
  const Tensor found = Tensor::of<float>({4}, {1, INFINITY, NAN, 2});
  Array exact({4}, 1), bound({4}, 0.5L);
  exact(1) = INFINITY;
  exact(2) = NAN;
  exact(3) = 1.6L;
  EXPECT_FALSE(outside(found, exact, bound));
  exact(3) = 1.4L;
  EXPECT_TRUE(outside(found, exact, bound));
  exact(3) = 2;
  exact(2) = 1;
  EXPECT_TRUE(outside(found, exact, bound));
  exact(2) = INFINITY;
  EXPECT_TRUE(outside(found, exact, bound));
  EXPECT_FALSE(outside(found, exact, bound, true));  // infinities that went in
}

TEST(Fuzz, a_fixed_seed_finds_nothing) {
  Settings settings{.seed = 20, .cases = 10000, .seconds = 15, .targets = targets()};
  const Summary summary = fuzz(settings);
  EXPECT_EQ(summary.findings, 0);
  EXPECT_GT(summary.cases, 0);
  std::cout << summary.cases << " cases in " << summary.seconds << " s\n" << summary.kinds << '\n';
}

}  // namespace
}  // namespace headway::test::fuzz
