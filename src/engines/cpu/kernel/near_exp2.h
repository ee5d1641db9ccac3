// 2^x for scores near their row's reference, in half the multiplications of exp2.h. A vocabulary with a lookup in 32
// floats splits x into a whole number, a multiple of 1/32 and a rest in [-1/64, 1/64]; the rest goes through a
// polynomial of degree 2 with 0.9 x 2^-24 of relative error, with all roundings less than 3.9 x 2^-24. The other
// vocabularies use exp2.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/exp2.h"
#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

// The bits of 2^(k/32 + raised), less k at the top of the mantissa and less what the shifted index below adds to the
// exponent.
struct NearPowers {
  alignas(64) std::uint32_t bits[32];
};
template <int raised>
constexpr NearPowers near_powers = [] {
  NearPowers powers{{0x0e800000, 0x0e7ecd87, 0x0e7daac3, 0x0e7c980f, 0x0e7b95c2, 0x0e7aa43a, 0x0e79c3d3, 0x0e78f4f0,
                     0x0e7837f0, 0x0e778d3a, 0x0e76f532, 0x0e767043, 0x0e75fed7, 0x0e75a15b, 0x0e75583f, 0x0e7523f6,
                     0x0e7504f3, 0x0e74fbaf, 0x0e7508a4, 0x0e752c4d, 0x0e75672a, 0x0e75b9be, 0x0e76248c, 0x0e76a81e,
                     0x0e7744fd, 0x0e77fbb8, 0x0e78ccdf, 0x0e79b907, 0x0e7ac0c7, 0x0e7be4ba, 0x0e7d257d, 0x0e7e83b3}};
  for (std::uint32_t& power : powers.bits) {
    power += static_cast<std::uint32_t>(raised) << 23;
  }
  return powers;
}();

template <class S>
concept LooksUpPowers = requires(typename S::Vector x) {
  S::times_looked_up_power(x, x, near_powers<0>.bits);
};

// 2^(x + raised) for any x: the witness is the sum of what came of them.
template <class S, int raised = 0>
struct SummedExp2 {
  using Vector = typename S::Vector;
  struct Witness {};

  // A row's sum of exponentials may grow to this before its reference is raised: far below overflow also for values of
  // 1e18, far above what ordinary scores reach.
  static constexpr double sum_limit = 0x1p30;

  HEADWAY_INLINE static Witness no_witness() { return {}; }
  HEADWAY_INLINE static Vector exponent(Vector score, Vector reference, Vector to_log2) {
    return (score - reference) * to_log2;
  }
  HEADWAY_INLINE static Vector of(Vector x, Witness&) { return exp2<S, raised>(x); }
  HEADWAY_INLINE static typename S::Mask out_of_reach(const Witness&, Vector sum) {
    return S::not_less_equal(sum, S::set(static_cast<typename S::Scalar>(sum_limit)));
  }
};

// A witness remembers whether any x was out of reach; what came of such an x means nothing.
template <class S, int raised = 0>
struct NearExp2 : SummedExp2<S, raised> {};

template <class S, int raised>
requires LooksUpPowers<S>
struct NearExp2<S, raised> {
  using Vector = typename S::Vector;
  using Witness = typename S::Bits;

  // Beside this number the last five bits of a float are 32nds, and for -98 <= x < 30 those above them count from 0 to
  // 127; no other x, nor NaN, has the same bits above those.
  static constexpr float whole = 0x1.8p18f + 98.0f;
  static constexpr std::uint32_t bits_in_reach = 12;

  HEADWAY_INLINE static Witness no_witness() { return S::no_bits(); }
  HEADWAY_INLINE static Vector exponent(Vector score, Vector reference, Vector to_log2) {
    return (score - reference) * to_log2;
  }
  HEADWAY_INLINE static Vector of(Vector x, Witness& witness) {
    const Vector index = x + S::set(whole);
    const Vector rest = x - (index - S::set(whole));
    witness = S::or_different_bits(witness, index, S::set(0x1.8p18f));
    const Vector p = S::fma(S::fma(S::set(0.24022646248340607f), rest, S::set(0.6931573152542114f)), rest, S::set(1));
    return S::times_looked_up_power(p, index, near_powers<raised>.bits);
  }
  HEADWAY_INLINE static typename S::Mask out_of_reach(const Witness& witness, Vector) {
    return S::any_bits_from(witness, bits_in_reach);
  }
};

}  // namespace
}  // namespace headway::cpu
