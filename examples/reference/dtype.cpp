#include "examples.h"

using namespace headway;

namespace {

void example_DType() {
  std::cout << DType::bf16 << ' ' << name(DType::b8) << ' ' << size_of(DType::bf16) << '\n';  // bf16 bool 2
  std::cout << is_float(DType::f16) << ' ' << is_integer(DType::f16) << '\n';                 // true false
  static_assert(dtype_of<float> == DType::f32 && has_dtype<double> && !has_dtype<char>);
}

void example_bfloat16() {
  const bfloat16 rounded(1.001f);  // 8 bits of precision: the nearest is 1
  std::cout << float(rounded) << ' ' << std::hex << rounded.bits << std::dec << '\n';  // 1 3f80
  std::cout << float(bfloat16::from_bits(0x4000)) << '\n';                             // 2
}

void example_float16() {
  std::cout << float(float16(65504.0f)) << ' ' << float(float16(65536.0f)) << '\n';  // 65504 inf
  std::cout << float(float16::from_bits(0x3c00)) << '\n';                            // 1
}

void example_float8_e4m3() {
  std::cout << float(float8_e4m3(448.0f)) << ' ' << float(float8_e4m3(1.1f)) << '\n';  // 448 1.125
  std::cout << float(float8_e4m3::from_bits(0x38)) << '\n';                            // 1
  std::cout << is_8bit(DType::f8e4m3) << ' ' << is_8bit(DType::bf16) << '\n';          // true false
}

}  // namespace

void dtype_examples() {
  example_DType();
  example_bfloat16();
  example_float16();
  example_float8_e4m3();
}
