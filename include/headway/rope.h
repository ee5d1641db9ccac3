// Rotary position embeddings (RoPE): pairs of a row's numbers are rotated by its position times the pair's frequency.
//
// With x the first number of pair n, y the second and a = position * frequency[n]:
//   x' = attention_factor * (x cos a - y sin a)
//   y' = attention_factor * (y cos a + x sin a)
// Angles, cosines and sines are computed in float64. f64 rows are rotated in float64; all others in float32, and
// rounded once to their own type.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "headway/cxx20.h"
#include "headway/tensor.h"

#pragma GCC visibility push(default)
namespace headway {

// How frequencies change for texts longer than those of the training; the names are those of Hugging Face's rope_type.
enum class RopeScaling : std::uint8_t {
  none,
  linear,   // every frequency is divided by factor
  dynamic,  // a larger base, which depends on the length of the text (NTK)
  yarn,     // low frequencies are divided by factor, high ones stay, between them a ramp over the pairs
  llama3,   // the same with a ramp over the wavelengths
};

struct RopeConfig {
  double base = 10000.0;                  // frequency[n] = base^(-2n / dims)
  std::optional<std::int64_t> dims = {};  // the first dims numbers of a row are rotated, the others stay; all if absent
  bool interleaved = false;               // pairs are (2n, 2n + 1), else (n, n + dims / 2)
  RopeScaling scaling = RopeScaling::none;
  double factor = 1.0;                               // of every scaling
  std::optional<std::int64_t> original_length = {};  // dynamic, yarn, llama3: the longest text of the training
  std::optional<std::int64_t> length = {};           // dynamic: the length of the text
  double beta_fast = 32.0;                           // yarn: more turns than this in original_length: not divided
  double beta_slow = 1.0;                            // yarn: fewer turns: divided
  bool truncate = true;                              // yarn: the ramp begins and ends at whole pairs
  std::optional<double> attention_factor = {};       // yarn: 0.1 ln(factor) + 1 when absent, or the ratio of
  std::optional<double> mscale = {};                 //   0.1 mscale ln(factor) + 1 and
  std::optional<double> mscale_all_dim = {};         //   0.1 mscale_all_dim ln(factor) + 1 if both are given, not 0
  double low_freq_factor = 1.0;                      // llama3: fewer turns in original_length: divided by factor
  double high_freq_factor = 4.0;                     // llama3: more turns: not divided
};

// The frequency of each pair, dims / 2 of them, and the factor of cosines and sines (1 except for yarn).
struct RopeFrequencies {
  std::vector<double> frequencies;
  double attention_factor = 1.0;
};

// The frequencies for rows of head_dim numbers. InvalidArgument for an invalid config.
RopeFrequencies rope_frequencies(std::int64_t head_dim, const RopeConfig& config = {});

// x [..., S, D] of any float type; positions integers [S], or [B,S] where x is [B, ..., S, D]. out has x's shape and
// type and may be x itself, or share no memory with it. On a CUDA device the work is queued on `stream`, a
// cudaStream_t; positions may be there or in host memory.
void rope(ConstTensorView x, ConstTensorView positions, TensorView out, const RopeConfig& config = {},
          void* stream = nullptr);
Tensor rope(ConstTensorView x, ConstTensorView positions, const RopeConfig& config = {}, void* stream = nullptr);

// The gradient of sum(grad_out * rope(x)) with respect to x: grad_out rotated back, times attention_factor.
void rope_backward(ConstTensorView grad_out, ConstTensorView positions, TensorView dx, const RopeConfig& config = {},
                   void* stream = nullptr);
Tensor rope_backward(ConstTensorView grad_out, ConstTensorView positions, const RopeConfig& config = {},
                     void* stream = nullptr);

}  // namespace headway
#pragma GCC visibility pop
