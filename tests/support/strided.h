// Tensors in every layout the contract allows, inside a buffer whose other bytes are known: NaN to whoever reads them,
// and a canary for whoever writes them.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <random>
#include <vector>

#include "headway/tensor.h"
#include "support/array.h"

namespace headway::test {

enum class Layout : std::uint8_t {
  contiguous,
  heads_inside,  // the two middle axes of four swapped in memory: [B,S,H,D]; of fewer axes, the first two
  gaps,          // every axis longer in memory than in the view, the last one with a step of 2
  reversed,      // every stride negative
  misaligned,    // one element past a 64-byte boundary, odd row length
  // For inputs only: stride 0 along the first axis, the second, the last but one or the last.
  repeated,
  repeated_heads,
  repeated_rows,
  repeated_columns,
};
const char* name(Layout layout);

class Strided {
 public:
  Strided() = default;
  Strided(const Dims& sizes, DType dtype, Layout layout = Layout::contiguous);

  TensorView view() { return {address(), dtype_, sizes_, strides_}; }
  ConstTensorView view() const { return {const_cast<Strided*>(this)->address(), dtype_, sizes_, strides_}; }

  // True when no byte outside of the view's elements has changed.
  bool surroundings_intact() const;

 private:
  void* address();

  std::vector<unsigned char> bytes_;
  std::size_t aligned_ = 0;  // where a 64-byte boundary lies in bytes_
  std::int64_t first_ = 0;   // element offset of view element 0
  DType dtype_ = DType::f32;
  Dims sizes_{0};
  Dims strides_{1};
};

using Random = std::mt19937_64;

// Normal numbers of the given size; their own view's layout decides what shares memory.
void fill_normal(TensorView view, Random& random, double size = 1.0);
// True with the given probability.
void fill_bool(TensorView view, Random& random, double probability);
Tensor normal(const Dims& sizes, DType dtype, Random& random, double size = 1.0);
Strided normal_strided(const Dims& sizes, DType dtype, Layout layout, Random& random, double size = 1.0);
Tensor filled(const Dims& sizes, DType dtype, double value);

}  // namespace headway::test
