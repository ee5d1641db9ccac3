// What is checked of a case: against the oracle with the contract's bounds, and bit for bit where it promises that.
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
  bool gradients_in_range = false;  // no sum on the way to a gradient comes near the largest f32
};

// Runs the case on this engine (the CPU engine with the process's instruction set). Throws what the library throws;
// Unsupported is a refusal.
std::optional<Failure> check(const Prepared& prepared, Engine engine);

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
std::optional<Failure> check_scores(const Prepared& prepared, const Call& call);
std::optional<Failure> check_analysis(const Prepared& prepared, const Call& call);
std::optional<Failure> check_bits(const Prepared& prepared, const Call& call, Outputs& outputs);
std::optional<Failure> check_layer(const Case& one, Engine engine);

// The first element that is further from the exact value than the bound, as text. NaN must be NaN and infinities the
// same; where infinities went in, anything that is not finite stands for both. What is past the type's range may be
// infinite.
std::optional<std::string> outside(ConstTensorView actual, const Array& exact, const Array& bound,
                                   bool infinities = false);
// The first element with other bits, as text.
std::optional<std::string> differing(ConstTensorView actual, ConstTensorView expected);

}  // namespace headway::test::fuzz
