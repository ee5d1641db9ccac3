// A call of attention from the bytes of an input: small tensors, sizes at which arithmetic goes wrong, every option.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "headway/attention.h"
#include "support.h"

namespace headway::fuzz {

class Call {
 public:
  explicit Call(Input& input);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  ConstTensorView query, key, value;
  AttentionOptions options;

  ConstTensorView view(Input& input, DType dtype, const Dims& sizes) const;

 private:
  void draw_options(Input& input, DType dtype);

  alignas(64) std::array<unsigned char, 8192> memory_{};  // what every view reads
};

Dims draw_sizes(Input& input, int rank);
std::vector<std::string> draw_texts(Input& input, std::int64_t expected);  // as many, none, or another number

// Queries times keys of all heads, times the widths: what a call costs. Infinity for sizes that make no sense.
double work_of(const Call& call);

}  // namespace headway::fuzz
