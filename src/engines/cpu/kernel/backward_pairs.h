// Attention backward through bf16 dot products: the tasks, sums and orders of backward.h with all five products in
// pairs.
//   S, dP   pairs along d: K^T and V^T packed [D / 2][keys] once per group of keys, Q and dO read in place
//   dV, dK  pairs of queries: P and dS as they leave the tile, dO and Q interleaved row by row once per visit
//   dQ      pairs of keys: dS as it leaves the tile, K interleaved once per group
// P and dS are rounded to bf16 there; sums stay in float. The dot products bound it, at half the FMAs' time.
//
// The instruction treats denormals as 0, in and out, and the 0 of a forbidden pair must not be multiplied by NaN or
// infinity. So a pair of a query and a key is computed here only if the numbers of both are of ordinary size and the
// row has no reference (backward_large_rows.h). The float kernel then computes the other pairs of the block and group
// of keys, with all finished pairs forbidden. Each pair is decided by its own numbers, so keys that a row may not see
// change none of its bits; numbers that are not ordinary are replaced by 0 where they would meet another pair's 0.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward.h"
#include "engines/cpu/kernel/kernels.h"
#include "engines/cpu/kernel/modifiers.h"
#include "engines/cpu/kernel/operands.h"

namespace headway::cpu {
namespace {

// T multiplies pairs, S scalars.
template <class T, class S>
class BackwardPairs : public Backward<S, bfloat16, 2> {
  using Base = Backward<S, bfloat16, 2>;
  using Base::args_;
  using Base::group_;
  using Base::head_;
  using Base::lanes;
  using Base::panel_count;
  using Base::panel_keys;
  using Base::panel_vectors;
  using Base::rows;
  using Base::width;
  using typename Base::Scalar;
  using Operand = typename Operands<T>::Scalar;
  using Pack = Packing<T, bfloat16>;
  using Magnitudes = typename Operands<T>::Magnitudes;

 public:
  static std::int64_t scratch_size(const BackwardArgs& args) {
    return Base::scratch_size(args) + PairLayout(args, nullptr).scratch.used;
  }

  BackwardPairs(const BackwardArgs& args, int chunk, Scalar* scratch)
      : Base(args, chunk, scratch), pairs_at_(args, scratch + Base::scratch_size(args)) {}

 private:
  struct PairLayout {
    Scratch<Scalar> scratch;
    Operand *key_panels, *value_panels, *key_rows, *queries, *grad_outs, *query_copy, *grad_out_copy;
    Operand *weights, *gradients, *gradient_rows;
    Scalar* bias_gradients;
    std::uint64_t *odd_keys, *odd_pairs, *ordinary_pairs;

    PairLayout(const BackwardArgs& args, Scalar* base) : scratch{base} {
      const std::int64_t keys = group_keys<S, 2>(args);
      const std::int64_t block_pairs = query_block / 2;
      key_panels = scratch.template take<Operand>(folded<T>(args.head_dim) * keys);
      value_panels = scratch.template take<Operand>(folded<T>(args.value_dim) * keys);
      key_rows = scratch.template take<Operand>(padded<S>(args.head_dim) * keys / 2);
      queries = scratch.template take<Operand>(paired_rows(args.head_dim));
      grad_outs = scratch.template take<Operand>(paired_rows(args.value_dim));
      query_copy = scratch.template take<Operand>(query_block * folded<T>(args.head_dim));
      grad_out_copy = scratch.template take<Operand>(query_block * folded<T>(args.value_dim));
      weights = scratch.template take<Operand>(block_pairs * width);
      gradients = scratch.template take<Operand>(block_pairs * width);
      gradient_rows = scratch.template take<Operand>(block_pairs * keys);
      bias_gradients = scratch.template take<Scalar>(query_block * width);
      odd_keys = scratch.template take<std::uint64_t>(keys / width);
      odd_pairs = scratch.template take<std::uint64_t>(keys / width * query_block);
      ordinary_pairs = scratch.template take<std::uint64_t>(keys / width * query_block);
    }
  };

  // Operands of a block's rows in pairs: [rows / 2][columns], or for tiles transposed.
  static constexpr std::int64_t transposed_rows_ld = transposed_ld(query_block);
  static std::int64_t paired_rows(std::int64_t columns) {
    return HasTiles<T> ? in_whole_tiles(columns) * transposed_rows_ld : query_block / 2 * columns;
  }
  OperandRows<T> paired(const Matrix& matrix, std::int64_t columns, Operand* copy, Magnitudes& seen) const {
    if constexpr (HasTiles<T>) {
      transpose_values<T, bfloat16>(matrix, rows().begin, rows().count, columns, copy, transposed_rows_ld, seen);
      return {copy, transposed_rows_ld};
    } else {
      return Pack::values(matrix, rows().begin, rows().count, columns, copy, columns, seen);
    }
  }

  // ---- Ordinary numbers ----

  // Magnitudes from 2^low up to 2^high, and 0, as the bits of bf16.
  struct Ordinary {
    std::uint16_t low, high;

    constexpr Ordinary(int low_exponent, int high_exponent)
        : low(static_cast<std::uint16_t>((127 + low_exponent) << 7)),
          high(static_cast<std::uint16_t>((127 + high_exponent) << 7)) {}
    bool holds(const Magnitudes& seen) const { return !seen.any_below(low) && !seen.any_from(high); }
    bool holds(std::uint32_t bits) const {
      const std::uint32_t magnitude = bits & 0x7fffu;
      return magnitude == 0 || (magnitude >= low && magnitude < high);
    }
  };
  // No product of two of them is flushed, and no sum overflows, also 2^32 times as large and with dropout's scale.
  static constexpr Ordinary inputs{-50, 20};        // Q, K and V
  static constexpr Ordinary gradients_in{-76, 20};  // dO
  static constexpr double highest_scale = 0x1p20;

  static bool row_is_odd(const Matrix& matrix, std::int64_t row, std::int64_t columns, const Ordinary& ordinary) {
    const bfloat16* first = static_cast<const bfloat16*>(matrix.data) + row * matrix.row_stride;
    for (std::int64_t c = 0; c < columns; ++c) {
      if (!ordinary.holds(first[c * matrix.column_stride].bits)) {
        return true;
      }
    }
    return false;
  }

  static void clear_odd(Operand* pairs, std::int64_t count, const Ordinary& ordinary) {
    for (std::int64_t n = 0; n < count; ++n) {
      for (int part = 0; part < 2; ++part) {
        if (!ordinary.holds(pairs[n] >> (16 * part))) {
          Operands<T>::clear_part(pairs + n, part);
        }
      }
    }
  }

  // Whether one of these pairs of a row and panel p is allowed.
  bool allows_any(std::int64_t row, int p, std::uint64_t pairs) const {
    const Range range = range_of_row(head_->ranges, row);
    const std::int64_t first = group_.begin + p * width;
    for (pairs &= range_word(inside_panel(range, first, panel_keys(p))); pairs != 0; pairs &= pairs - 1) {
      if (is_allowed(head_->ranges, head_->modifiers, range, row, first + __builtin_ctzll(pairs))) {
        return true;
      }
    }
    return false;
  }

  // Sorts the block's and the group's pairs into words, [panel][query_block]. Returns whether an allowed one is not
  // ordinary.
  HEADWAY_NOINLINE bool find_odd_pairs() {
    bool any = false;
    for (int r = 0; r < rows().count; ++r) {
      const std::int64_t row = rows().begin + r;
      const bool odd = static_cast<const Scalar*>(head_->references)[row] != 0 ||
                       row_is_odd(head_->query, row, args_.head_dim, inputs) ||
                       row_is_odd(head_->grad_out, row, args_.value_dim, gradients_in);
      for (int p = 0; p < panel_count(); ++p) {
        const std::uint64_t pairs = odd ? low_bits(panel_keys(p)) : pairs_at_.odd_keys[p];
        pairs_at_.odd_pairs[p * query_block + r] = pairs;
        pairs_at_.ordinary_pairs[p * query_block + r] = low_bits(panel_keys(p)) & ~pairs;
        any = any || allows_any(row, p, pairs);
      }
    }
    return any;
  }

  // ---- The group of keys ----

  void load_group() override {
    this->start_sums();
    floats_packed_ = false;
    for (int p = 0; p < panel_count(); ++p) {
      for (int v = 0; v < panel_vectors(p); ++v) {
        const std::int64_t key = group_.begin + p * width + v * lanes;
        const int count = at_most(group_.end - key, lanes);
        Pack::queries(args_.key, key, count, args_.head_dim, 1,
                      pairs_at_.key_panels + p * folded<T>(args_.head_dim) * width + v * lanes, width);
        Pack::queries(args_.value, key, count, args_.value_dim, 1,
                      pairs_at_.value_panels + p * folded<T>(args_.value_dim) * width + v * lanes, width);
      }
    }
    const std::int64_t ld = padded<S>(args_.head_dim);
    const std::int64_t keys = group_.end - group_.begin;
    for (std::int64_t n = 0; ld != args_.head_dim && n < folded<T>(keys) * ld; n += lanes) {
      Operands<T>::store(pairs_at_.key_rows + n, Operands<T>::zero());  // for what lies behind the last column
    }
    for (std::int64_t n = (keys + 1) / 2 * ld; HasTiles<T> && n < folded<T>(keys) * ld; n += lanes) {
      Operands<T>::store(pairs_at_.key_rows + n, Operands<T>::zero());  // for what lies behind the last key
    }
    Magnitudes seen;
    Pack::values(args_.key, group_.begin, keys, args_.head_dim, pairs_at_.key_rows, ld, seen);
    group_is_odd_ =
        !inputs.holds(seen) || !inputs.holds(Pack::magnitudes(args_.value, group_.begin, group_.end, args_.value_dim));
    if (group_is_odd_) {
      clear_odd(pairs_at_.key_rows, folded<T>(keys) * ld, inputs);
    }
    for (int p = 0; p < panel_count(); ++p) {
      pairs_at_.odd_keys[p] = 0;
      for (int n = 0; group_is_odd_ && n < panel_keys(p); ++n) {
        const std::int64_t key = group_.begin + p * width + n;
        const bool odd =
            row_is_odd(args_.key, key, args_.head_dim, inputs) || row_is_odd(args_.value, key, args_.value_dim, inputs);
        pairs_at_.odd_keys[p] |= static_cast<std::uint64_t>(odd) << n;
      }
    }
  }

  // ---- A block of queries ----

  void differentiate() override {
    Magnitudes seen_queries, seen_grad_outs;
    const OperandRows<T> queries = paired(head_->query, args_.head_dim, pairs_at_.queries, seen_queries);
    const OperandRows<T> grad_outs = paired(head_->grad_out, args_.value_dim, pairs_at_.grad_outs, seen_grad_outs);
    const double scale = args_.scale;
    const bool ordinary_scale = scale < highest_scale && scale > -highest_scale &&
                                TileGradients<T>::factor_of(scale, head_->modifiers).power == 1;
    if (!ordinary_scale || bias_may_be_summed()) {
      differentiate_floats(nullptr, false);
      return;
    }
    const bool odd_rows = !inputs.holds(seen_queries) || !gradients_in.holds(seen_grad_outs);
    const bool has_references = references_of<S>(*head_, rows().begin, rows().count) != nullptr;
    const bool sees_odd = (odd_rows || has_references || group_is_odd_) && find_odd_pairs();
    if (odd_rows) {
      clear_odd(pairs_at_.queries, paired_rows(args_.head_dim), inputs);
      clear_odd(pairs_at_.grad_outs, paired_rows(args_.value_dim), gradients_in);
    }
    const OperandRows<T> query = block_pairs(head_->query, args_.head_dim, pairs_at_.query_copy);
    const OperandRows<T> grad_out = block_pairs(head_->grad_out, args_.value_dim, pairs_at_.grad_out_copy);
    this->wanted_ = sees_odd ? pairs_at_.ordinary_pairs : nullptr;
    for (int p = 0; p < panel_count(); ++p) {
      this->look_ahead(p);
      add_panel(p, query, grad_out, queries, grad_outs);
    }
    if (this->wants_dq()) {
      this->template add_query_products<T>(pairs_at_.gradient_rows, pairs_at_.key_rows);
    }
    if (sees_odd) {
      differentiate_floats(pairs_at_.odd_pairs, true);
    }
    this->wanted_ = nullptr;
  }

  // Of a sequence with one query or one key a bias with one row or column is that of each pair; in a pack with longer
  // sequences it is summed over, from the tiles of the float kernel.
  bool bias_may_be_summed() const {
    return head_->modifiers.bias.data != nullptr && (args_.queries == 1 || args_.ranges.keys == 1);
  }

  // The float kernel for the wanted pairs, all of them where it is null; `adds`: to what others gave.
  void differentiate_floats(const std::uint64_t* wanted, bool adds) {
    if (!floats_packed_) {
      this->pack_group();
      floats_packed_ = true;
    }
    this->wanted_ = wanted;
    this->adds_to_sums_ = adds;
    Base::differentiate();
    this->adds_to_sums_ = false;
    this->wanted_ = nullptr;
  }

  // Rows in pairs along d. Those that lie far apart are copied, as in Base::block_rows.
  OperandRows<T> block_pairs(const Matrix& matrix, std::int64_t columns, Operand* copy) const {
    return this->compact(matrix, columns) ? Pack::keys(matrix, rows().begin, rows().count, columns, copy)
                                          : Pack::copied_keys(matrix, rows().begin, rows().count, columns, copy);
  }

  void add_panel(int p, const OperandRows<T>& query, const OperandRows<T>& grad_out, const OperandRows<T>& queries,
                 const OperandRows<T>& grad_outs) {
    const ChunkPlace place{rows().begin, rows().count, group_.begin + p * width, panel_keys(p)};
    const Range keys{place.key_begin, place.key_begin + place.keys};
    if (!this->reaches(keys)) {
      this->skip_panel(p);
      return;
    }
    Tile<T> tile = this->template tile_at<T>(p, place, query, grad_out, pairs_at_.key_panels, pairs_at_.value_panels);
    tile.pairs = {pairs_at_.weights, pairs_at_.gradients, pairs_at_.gradient_rows + p * query_block * (width / 2)};
    TileGradients<T> gradients(args_, *head_, tile);
    const bool edge = this->has_edge(keys);
    gradients.run(edge, this->wants_gradients());
    if (head_->dbias.data != nullptr) {
      store_bias(place, tile.gradients);
    }
    if (head_->modifiers.softcap != 0) {
      gradients.apply_slopes();
    }
    gradients.make_pairs();
    for (std::int64_t n = (place.rows + 1) / 2 * width; HasTiles<T> && n < folded<T>(place.rows) * width; n += lanes) {
      Operands<T>::store(pairs_at_.weights + n, Operands<T>::zero());  // for what lies behind the last row
      Operands<T>::store(pairs_at_.gradients + n, Operands<T>::zero());
    }
    if (args_.dv.data != nullptr) {
      this->template add_key_products<T>(p, edge, tile.pairs.weights, grad_outs, args_.value_dim, this->at_.dv_panels);
    }
    if (args_.dk.data != nullptr) {
      this->template add_key_products<T>(p, edge, tile.pairs.gradients, queries, args_.head_dim, this->at_.dk_panels);
    }
    this->sums_filled(p);
  }

  void store_bias(const ChunkPlace& place, const Scalar* gradients) {
    const auto lower = S::set(Base::template lowering<T>);
    for (int n = 0; n < place.rows * width; n += lanes) {
      S::store(pairs_at_.bias_gradients + n, S::load(gradients + n) * lower);
    }
    store_as(head_->dbias, head_->dbias_storage, place.row_begin, place.rows, place.key_begin, place.keys,
             pairs_at_.bias_gradients, width);
  }

  PairLayout pairs_at_;
  bool floats_packed_ = false;  // whether the float kernel's panels are those of the group
  bool group_is_odd_ = false;
};

template <class T, class S>
void run_gradients_pairs(const BackwardArgs& args, int chunk, void* scratch) {
  BackwardPairs<T, S>(args, chunk, static_cast<typename S::Scalar*>(scratch)).run();
}

template <class T, class S>
std::int64_t gradients_scratch_pairs(const BackwardArgs& args) {
  return BackwardPairs<T, S>::scratch_size(args) * static_cast<std::int64_t>(sizeof(typename S::Scalar));
}

// The float kernel but for `gradients`.
template <class T, class S>
constexpr BackwardKernel backward_pairs_kernel() {
  BackwardKernel kernel = backward_kernel<S, bfloat16>();
  kernel.is_short = [](const BackwardArgs&) { return false; };
  kernel.gradients = run_gradients_pairs<T, S>;
  kernel.scratch_bytes = gradients_scratch_pairs<T, S>;
  return kernel;
}

}  // namespace
}  // namespace headway::cpu
