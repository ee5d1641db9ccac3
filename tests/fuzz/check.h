// The checks of a case: against the oracle with the contract's bounds, and bit for bit where the contract promises it.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "fuzz/materials.h"

namespace headway::test::fuzz {

struct Failure {
  std::string check;  // a few words: what was compared
  std::string text;   // which element, what was found and what was expected
};

// What a result should be, in the shape that the call gives it, and how far each element may be off.
struct Expected {
  Array exact, bound;
};

struct ExpectedScores {
  Stage stage;
  const char* name;
  Expected expected;
};

struct ExpectedGradient {
  const char* name;
  const Bounded& (*of)(const Backward&);
  DType type;
  Dims sizes;
  bool of_rows, of_keys;  // which axis of it a pack joins, if any
  Expected expected;
};

// A result of a layer, by the name of what it is: "output", "queries", "W_q".
struct ExpectedOfLayer {
  std::string name;
  Expected expected;
};

// Which rows see which keys.
class Sight {
 public:
  Sight() = default;
  explicit Sight(const Spec& spec);

  bool sees(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    return sees_[static_cast<std::size_t>(((b * heads_ + h) * queries_ + i) * keys_ + j)] != 0;
  }
  bool sees_any(std::int64_t b, std::int64_t h, std::int64_t i) const {
    for (std::int64_t j = 0; j < keys_; ++j)
      if (sees(b, h, i, j)) return true;
    return false;
  }
  // Calls visit(h, i) for every row of the group of kv head g; whether one of them said true.
  template <class Visit>
  bool any_row(std::int64_t b, std::int64_t g, Visit visit) const {
    for (std::int64_t h = g * group_; h < (g + 1) * group_; ++h)
      for (std::int64_t i = 0; i < rows_[static_cast<std::size_t>(b)]; ++i)
        if (visit(h, i)) return true;
    return false;
  }
  bool seen(std::int64_t b, std::int64_t g, std::int64_t j) const {
    return any_row(b, g, [&](std::int64_t h, std::int64_t i) { return sees(b, h, i, j); });
  }

 private:
  std::int64_t heads_ = 0, queries_ = 0, keys_ = 0, group_ = 1;
  std::vector<std::int64_t> rows_;  // of each item
  std::vector<char> sees_;
};

// A case with what the oracle says of it; made once, for every engine and instruction set.
struct Prepared {
  explicit Prepared(const Case& one);

  // Why nothing can be expected of the case (scores past what f32 holds), or nothing.
  std::string rejected;
  Materials materials;
  Spec spec;
  Array grad_out;
  Forward forward;
  Backward backward;
  Sight sight;
  Expected out, lse, weights;
  // dq, dk, dv, dbias, dsinks; empty where a sum on the way to a gradient comes near the largest f32.
  std::vector<ExpectedGradient> gradients;
  std::vector<ExpectedScores> scores;  // weights alone where some are past what f32 holds
  std::vector<ExpectedOfLayer> layer;  // empty where the weights are not known well enough to judge by
};

// Runs the case on this engine (the CPU engine with the process's instruction set). Throws what the library throws;
// Unsupported is a refusal.
std::optional<Failure> check(const Prepared& prepared, Engine engine, bool batch_invariant = false);

// ---- The parts of it ----

// Results in the layout of the case; for a call without a tensor of a kind, that one is empty.
struct Outputs {
  Outputs(const Materials& materials, const Call& call);
  AttentionOutputs views(bool weights = true);
  AttentionGradients gradients(const Call& call);
  bool surroundings_intact() const;

  Strided out, lse, weights, dq, dk, dv, dbias, dsinks;
};

std::optional<Failure> check_forward(const Prepared& prepared, const Call& call, Outputs& outputs);
std::optional<Failure> check_backward(const Prepared& prepared, const Call& call, Outputs& outputs);
// dq, dk, dv, then those of dbias and dsinks that the call has.
std::optional<Failure> check_gradients(const Prepared& prepared, const Call& call,
                                       const std::vector<TensorView>& actual);
std::optional<Failure> check_split(const Prepared& prepared, const Call& call);
std::optional<Failure> check_scores(const Prepared& prepared, const Call& call);
std::optional<Failure> check_analysis(const Prepared& prepared, const Call& call);
std::optional<Failure> check_bits(const Prepared& prepared, const Call& call, Outputs& outputs);
std::optional<Failure> check_paged(const Prepared& prepared, const Call& call, const Results& base);
std::optional<Failure> check_layer(const Prepared& prepared, Engine engine);
std::optional<Failure> check_cache(const Prepared& prepared, Engine engine);
std::vector<ExpectedOfLayer> expected_of_layer(const Case& one);

// The first element that is further from the exact value than the bound, as text. NaN must be NaN and infinities the
// same; where infinities went in, anything that is not finite stands for both. What is past the type's range may be
// infinite.
std::optional<std::string> outside(ConstTensorView actual, const Array& exact, const Array& bound,
                                   bool infinities = false);
inline std::optional<std::string> outside(ConstTensorView actual, const Expected& expected, bool infinities = false) {
  return outside(actual, expected.exact, expected.bound, infinities);
}
// The first element with other bits, as text.
std::optional<std::string> differing(ConstTensorView actual, ConstTensorView expected);

// How many times this process has compared a tensor by one of the two.
std::int64_t comparisons();

}  // namespace headway::test::fuzz
