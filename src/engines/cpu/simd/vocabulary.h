// What an instruction set's vocabulary must offer to the kernels, and what it may offer on top. isa/ files check it
// where they use a vocabulary; tests/simd compares each operation with plain C++.
#pragma once

#include <concepts>
#include <cstdint>

#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

// ---- What each must offer ----

// Scalars, vectors of `lanes` of them, and how many registers a kernel may fill.
template <class S>
concept HasSizes = (sizeof(typename S::Vector) == S::lanes * sizeof(typename S::Scalar)) && S::panel_vectors >= 1 &&
                   (S::lanes * S::panel_vectors <= 64)  // a word of bits holds a panel
                   && S::tile_scalars >= 1 && S::edge_scalars >= S::tile_scalars&& requires {
  { S::fused_softmax } -> std::convertible_to<bool>;  // whether a panel's exponentials may follow its products
};

// Beside these, vectors have the operators + - * /.
template <class S>
concept HasArithmetic = requires(typename S::Vector a, typename S::Scalar x, typename S::Scalar* p) {
  { S::zero() } -> std::same_as<typename S::Vector>;
  { S::set(x) } -> std::same_as<typename S::Vector>;
  { S::load(p) } -> std::same_as<typename S::Vector>;  // from any address
  { S::store(p, a) } -> std::same_as<void>;
  { S::fma(a, a, a) } -> std::same_as<typename S::Vector>;
  { S::fma_scalar(x, x, x) } -> std::same_as<typename S::Scalar>;  // with the rounding of fma
  { S::max(a, a) } -> std::same_as<typename S::Vector>;            // the second where one is NaN; so is min
  { S::min(a, a) } -> std::same_as<typename S::Vector>;
  { S::abs(a) } -> std::same_as<typename S::Vector>;
  { S::round(a) } -> std::same_as<typename S::Vector>;                // to the nearest whole number, ties to even
  { S::times_power_of_2(a, a) } -> std::same_as<typename S::Vector>;  // a near 1, and a whole number: see common.h
};

template <class S>
concept HasMasks = requires(typename S::Vector a, typename S::Mask m, std::uint64_t bits) {
  { S::select(m, a, a) } -> std::same_as<typename S::Vector>;
  { S::less(a, a) } -> std::same_as<typename S::Mask>;
  { S::less_equal(a, a) } -> std::same_as<typename S::Mask>;
  { S::not_less_equal(a, a) } -> std::same_as<typename S::Mask>;  // true where one is NaN
  { S::equal(a, a) } -> std::same_as<typename S::Mask>;
  { S::both(m, m) } -> std::same_as<typename S::Mask>;
  { S::any(m) } -> std::same_as<bool>;
  { S::mask_from_bits(bits) } -> std::same_as<typename S::Mask>;  // lane l from bit l; other bits mean nothing
};

// The first n elements of a row of In, n from 0 to lanes: the other lanes are 0, and nothing behind them is read.
template <class S, class In>
concept Loads = requires(const In* row, int n) {
  { S::load_first(row, n) } -> std::same_as<typename S::Vector>;
};
// Rounded to nearest even, denormals kept; nothing behind the first n is written.
template <class S, class In>
concept Stores = requires(In* row, int n, typename S::Vector a) {
  { S::store_first(row, n, a) } -> std::same_as<void>;
};

template <class S>
concept HasRows = Loads<S, typename S::Scalar> && Loads<S, float> && Loads<S, float16> && Loads<S, bfloat16> &&
    Stores<S, typename S::Scalar> && requires(typename S::Vector (&rows)[S::lanes]) {
  { S::transpose(rows) } -> std::same_as<void>;  // rows[i] lane j becomes rows[j] lane i
};

// Words of 64 bits for Philox, of which the low 32 count.
template <class S>
concept HasWords = S::word_lanes >= 1 && requires(typename S::Words a, std::uint32_t x, std::uint64_t word) {
  { S::words(x) } -> std::same_as<typename S::Words>;
  { S::consecutive_words(word) } -> std::same_as<typename S::Words>;
  { S::multiply_low_words(a, a) } -> std::same_as<typename S::Words>;  // all 64 bits of the product
  { S::high_words(a) } -> std::same_as<typename S::Words>;
  { S::exclusive_or(a, a, a) } -> std::same_as<typename S::Words>;
  { S::low_words_at_least(a, word) } -> std::same_as<std::uint64_t>;  // bit l for lane l
};

template <class S>
concept Vocabulary = HasSizes<S> && HasArithmetic<S> && HasMasks<S> && HasRows<S> && HasWords<S>;

// A vocabulary of floats reads 8-bit rows and writes halves too.
template <class S>
concept FloatVocabulary = Vocabulary<S> && std::same_as<typename S::Scalar, float> && Loads<S, int8> &&
    Loads<S, float8> && Stores<S, float16> && Stores<S, bfloat16>;
template <class S>
concept DoubleVocabulary = Vocabulary<S> && std::same_as<typename S::Scalar, double> && Loads<S, double>;

// ---- What pairs of bf16 must offer: Operands<S> of a vocabulary that multiplies them ----

template <class Operand, class S>
concept PairOperands = Operand::fold == 2 &&
                       requires(typename Operand::Vector a, typename Operand::Vector& out, typename Operand::Scalar* p,
                                const bfloat16* row, int n, typename Operand::Magnitudes seen, typename S::Vector x) {
  { Operand::load(p) } -> std::same_as<typename Operand::Vector>;
  { Operand::broadcast(p) } -> std::same_as<typename Operand::Vector>;
  { Operand::multiply_add(a, a, x) } -> std::same_as<typename S::Vector>;  // x + first * first + second * second
  { Operand::zero() } -> std::same_as<typename Operand::Vector>;
  Operand::store(p, a);
  Operand::clear_part(p, n);  // one number of a pair becomes 0
  { Operand::load_first(row, n) } -> std::same_as<typename Operand::Vector>;
  Operand::store_first(p, n, a);
  Operand::interleave(a, a, out, out);
  Operand::store_interleaved(p, n, a, a);
  { Operand::rounded(x, x) } -> std::same_as<typename Operand::Vector>;  // 2 * lanes numbers in order
  { Operand::pairs(x, x) } -> std::same_as<typename Operand::Vector>;    // lane by lane
  { Operand::times_power(a, 0.5) } -> std::same_as<typename Operand::Vector>;
  { Operand::rows_paired(row, row, n) } -> std::same_as<typename Operand::Vector>;
  seen.see(a);
  { seen.any_below(std::uint16_t{}) } -> std::same_as<bool>;
  { seen.any_from(std::uint16_t{}) } -> std::same_as<bool>;
};

// Pairs may also offer Bytes<int8> and Bytes<float8>, which convert 8-bit numbers for kernel/decode_bytes.h:
// decode_pairs_kernel asks for them.

// ---- What tile registers must offer ----

template <class Tiles>
concept TileRegisters = requires(void* rows, const void* from, std::int64_t stride) {
  typename Tiles::InUse;  // while one lives, its thread has tiles
  Tiles::template zero<0>();
  Tiles::template load<0>(from, stride);
  Tiles::template load_passing<0>(from, stride);
  Tiles::template store<0>(rows, stride);
  Tiles::template multiply_add<0, 1, 2>();
};

// ---- What a vocabulary may offer on top, and kernels do without ----

// kernel/near_exp2.h asks for times_looked_up_power with no_bits, or_different_bits and any_bits_from (LooksUpPowers);
// kernel/tile_exp2.h, with tiles, for fraction and times_whole_power_of_2.
template <class S>
concept SumsLanes = requires(typename S::Vector (&rows)[S::lanes]) {
  { S::lane_sums(rows) } -> std::same_as<typename S::Vector>;  // lane l is the sum of rows[l]
};
template <class S>
concept LoadsAlternating = requires(const bfloat16* row, typename S::Vector& a) {
  S::load_alternating(row, a, a);  // 2 * lanes elements, those at even places and those at odd ones
  S::merge_alternating(a, a);      // numbers so split, in order again
};
template <class S>
concept FindsNonzeroBytes = requires(const std::uint8_t* bytes, int n) {
  { S::nonzero_bytes(bytes, n) } -> std::same_as<std::uint64_t>;
};
template <class S>
concept TransposesBits = requires(std::uint64_t (&bits)[64]) {
  S::transpose_bits(bits);  // bit j of word r becomes bit r of word j; words behind a panel's rows are 0
};
template <class S>
concept ComparesTwoWords = requires(typename S::Words a, std::uint64_t limit) {
  { S::low_words_at_least(a, a, limit) } -> std::same_as<std::uint64_t>;  // the lanes of the first, then the second's
};

}  // namespace
}  // namespace headway::cpu
