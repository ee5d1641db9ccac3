// The tensors of a case, and the call over them.
#pragma once

#include <functional>

#include "fuzz/case.h"
#include "support/call.h"

namespace headway::test::fuzz {

// The options of a case with their tensors, for items of these lengths.
struct OptionTensors {
  Strided mask, bias, valid_lens, query_lens, spans, slopes, sinks;
};

// A call with its tensors. It stays where it was made: the call's views point into it.
class Materials {
 public:
  explicit Materials(const Case& one);
  Materials(const Materials&) = delete;
  Materials& operator=(const Materials&) = delete;

  const Case what;
  Call call;
  ConstTensorView grad_out;
  bool has_infinities = false;  // among what allowed pairs read

  // Memory for a result, in the case's layout.
  Strided output(const Dims& sizes, DType dtype) const { return Strided(sizes, dtype, what.out_layout); }

 private:
  void make_packing();
  void make_tensors();
  void plant();
  void plant_one(const Plant& plant, const Spec& spec, Random& random);

  Strided q_, k_, v_, grad_out_;
  OptionTensors options_;
};

// Fills a tensor of rank 2 or more; its rows lie along the last axis.
void fill(TensorView view, Numbers numbers, double size, Random& random);

// Mask, bias, lengths, spans, slopes, sinks and the plain options, into `options`, whose views point into `tensors`.
void make_options(const Case& one, const std::vector<std::int64_t>& rows, const std::vector<std::int64_t>& keys,
                  OptionTensors& tensors, AttentionOptions& options);

// A stream of numbers of its own for each tensor, so that a change of one leaves the others.
inline Random stream(const Case& one, std::uint64_t number) { return Random(one.seed * 1000003 + number); }

double value_of(Odd odd, DType type);
double largest_finite(DType type);

}  // namespace headway::test::fuzz
