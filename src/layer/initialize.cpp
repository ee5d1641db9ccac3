// Parameter draws: a pure function of (seed, parameter, element), the same on every machine.
#include "layer/initialize.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "core/elements.h"
#include "core/philox.h"

namespace headway {
namespace {

// The last counter word of parameter draws, "HEAD" in ASCII. Dropout has the batch index there, so a layer and its
// dropout may share a seed and still draw different words.
constexpr std::uint32_t parameter_stream = 0x48454144;

// The top 53 of 64 random bits as a number in [0, 1): exact in float64.
double unit_interval(std::uint32_t low, std::uint32_t high) {
  const std::uint64_t bits = (std::uint64_t{high} << 32) | low;
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

// Calls store(e, u) for each element e with its u in [0, 1); one Philox block serves two elements.
template <class Store>
void for_each_draw(std::uint64_t seed, std::uint32_t parameter, std::int64_t elements, const Store& store) {
  for (std::int64_t e = 0; e < elements; e += 2) {
    const auto block = static_cast<std::uint64_t>(e / 2);
    const Philox4x32::Counter words = Philox4x32::words(
        {static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32), parameter, parameter_stream},
        seed);
    store(e, unit_interval(words[0], words[1]));
    if (e + 1 < elements) {
      store(e + 1, unit_interval(words[2], words[3]));
    }
  }
}

// The largest number below 1 of each type: 1 - 2^-(mantissa bits).
template <class T>
double largest_below_one() {
  constexpr double ulp = std::is_same_v<T, double>    ? 0x1p-53
                         : std::is_same_v<T, float>   ? 0x1p-24
                         : std::is_same_v<T, float16> ? 0x1p-11
                                                      : 0x1p-8;
  return 1.0 - ulp;
}

// a of the symmetric initializers U(-a, a).
double bound(const ParameterSpec& spec, Initializer initializer) {
  const auto inputs = static_cast<double>(spec.inputs);
  const auto outputs = static_cast<double>(spec.outputs);
  return initializer == Initializer::xavier_uniform ? std::sqrt(6.0 / (inputs + outputs)) : 1.0 / std::sqrt(inputs);
}

template <class T>
void draw(const ParameterSpec& spec, const MultiHeadAttentionConfig& config, Tensor& into) {
  T* values = into.as<T>();
  const double a = bound(spec, config.initializer);
  const bool unit = config.initializer == Initializer::uniform_01;
  for_each_draw(config.seed, spec.number, into.elements(), [&](std::int64_t e, double u) {
    values[e] = converted<T>(unit ? std::min(u, largest_below_one<T>()) : (2.0 * u - 1.0) * a);
  });
}

}  // namespace

Tensor draw_parameter(const ParameterSpec& spec, const MultiHeadAttentionConfig& config) {
  Tensor parameter(spec.sizes, config.dtype);
  if (spec.is_bias() && config.initializer == Initializer::xavier_uniform) {
    return parameter;
  }
  with_float_type(config.dtype, [&](auto type) { draw<decltype(type)>(spec, config, parameter); });
  return parameter;
}

}  // namespace headway
