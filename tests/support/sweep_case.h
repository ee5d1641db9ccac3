// The option space of section 1 as factors, and a random call for each combination of their levels.
#pragma once

#include <memory>

#include "support/call.h"
#include "support/pairwise.h"
#include "support/strided.h"

namespace headway::test {

const std::vector<Factor>& sweep_factors();
bool sweep_compatible(int factor_a, int level_a, int factor_b, int level_b);

// A call with its tensors. It stays where it was made: the call's views point into it.
class SweepCase {
 public:
  SweepCase(const Assignment& levels, std::uint64_t seed);
  SweepCase(const SweepCase&) = delete;
  SweepCase& operator=(const SweepCase&) = delete;

  std::string description;
  Call call;
  Strided grad_out;

  // Whether some row attends to two keys (to one, where more is impossible) and not all is dropped.
  bool live() const;

  // Run on the call's engine and compare results and canaries.
  void check_forward();
  void check_backward();

 private:
  struct Shape;
  void make_tensors(const Shape& shape);
  void make_packing(const Shape& shape);
  void make_mask(const Shape& shape);
  void make_bias(const Shape& shape);
  void make_key_ranges(const Shape& shape);
  void make_modifiers(const Shape& shape);
  int level(const char* factor) const;
  std::string level_name(const char* factor) const;
  Layout layout(const char* factor) const;
  Strided output(const Dims& sizes, DType dtype) const;
  std::int64_t random_up_to(std::int64_t largest);
  std::int64_t random_length(std::int64_t largest, std::int64_t b);

  Assignment levels_;
  Random random_;
  DType type_;
  Strided q_, k_, v_, mask_, bias_, valid_lens_, query_lens_, slopes_, sinks_;
};

}  // namespace headway::test
