// The products of a tile of the backward pass, Q K^T and dO V^T, and what follows from them while they are in
// registers.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_args.h"
#include "engines/cpu/kernel/backward_tile_data.h"
#include "engines/cpu/kernel/backward_tile_weights.h"
#include "engines/cpu/kernel/exp2.h"
#include "engines/cpu/kernel/key_lanes.h"
#include "engines/cpu/kernel/operands.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/strips.h"
#include "engines/cpu/kernel/tile.h"
#include "engines/cpu/kernel/tile_products.h"

namespace headway::cpu {
namespace {

// What is stored of a product. Natural weights are those of scores that nothing but a mask changes; gradients need the
// weights.
enum class Product { scores, weights, natural_weights, raw_gradients, gradients };

constexpr bool is_of_scores(Product product) {
  return product == Product::scores || product == Product::weights || product == Product::natural_weights;
}

template <class S>
class TileProducts {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  using Operand = typename Operands<S>::Scalar;
  using OperandVector = typename Operands<S>::Vector;
  using Near = typename TileWeights<S>::Near;
  static constexpr bool hides = TileWeights<S>::hides;
  static constexpr int lanes = S::lanes, width = S::lanes * S::panel_vectors, fold = Operands<S>::fold;

 public:
  TileProducts(const BackwardArgs& args, const BackwardHead& head, const Tile<S>& tile, const TileWeights<S>& weights)
      : keeps_gradients(fold == 1 || head.dbias.data != nullptr),
        args_(args),
        tile_(tile),
        weights_(weights),
        modified_(change_scores(head.modifiers)) {}

  const bool keeps_gradients;  // whether someone reads dS as scalars
  bool keeps_pairs = false;    // whether pairs leave the registers as such

  template <Product product>
  void multiply(Patch patch) const {
    if (patch.vector_begin == patch.vector_end) {
      return;
    }
    if constexpr (!HasTiles<S> && hides && (product == Product::weights || product == Product::gradients)) {
      patch.row_begin += overlapped<product>(patch);
    }
    with_vectors<S::panel_vectors>(patch.vector_end - patch.vector_begin, [&]<int NV>(Strip<NV>) HEADWAY_LAMBDA {
      if constexpr (HasTiles<S>) {
        multiply_by_tiles<NV, product>(patch);
      } else {
        multiply_vectors<NV, product>(patch);
      }
    });
  }

 private:
  // ---- What is multiplied ----

  template <Product product>
  const OperandRows<S>& rows_of() const {
    return is_of_scores(product) ? tile_.query : tile_.grad_out;
  }
  template <Product product>
  const Operand* panel_of() const {
    return is_of_scores(product) ? tile_.key_panel : tile_.value_panel;
  }
  template <Product product>
  std::int64_t dim_of() const {
    return is_of_scores(product) ? args_.head_dim : args_.value_dim;
  }
  template <Product product, int NB>
  HEADWAY_INLINE void fetch(int r, int count) const {
    (is_of_scores(product) ? tile_.ahead->query : tile_.ahead->grad_out)
        .template fetch<fetched_locality<NB>()>(r, count);
    (is_of_scores(product) ? tile_.ahead->mask : tile_.ahead->bias).fetch(r, count);
  }

  // ---- By tiles ----

  // 32 rows at a time, those of the next ones before what follows from the products of these, so that the one hides
  // behind the other.
  template <int NV, Product product>
  HEADWAY_NOINLINE void multiply_by_tiles(const Patch& patch) const {
    constexpr int at_once = 2 * tile_side;
    const OperandRows<S>& rows = rows_of<product>();
    const Operand* vectors = panel_of<product>() + patch.vector_begin * lanes;
    const std::int64_t steps = folded<S>(dim_of<product>()) / tile_pairs;
    alignas(64) Scalar raw[2][at_once * NV * lanes];
    const auto products = [&](int r, int side) HEADWAY_LAMBDA {
      fetch<product, 1>(r, at_once);
      rows_by_tiles<S, NV>({rows.data + r * rows.ld, rows.ld}, patch.row_end - r, vectors, width, steps, raw[side]);
    };
    int side = 0;
    products(patch.row_begin, side);
    for (int r = patch.row_begin; r < patch.row_end; r += at_once, side ^= 1) {
      if (r + at_once < patch.row_end) {
        products(r + at_once, side ^ 1);
      }
      const Scalar* sums = raw[side];
      in_strips<S::tile_scalars, fold>(
          at_most(patch.row_end - r, at_once), [&](auto strip, std::int64_t first) HEADWAY_LAMBDA {
            Accumulators<S, NV, strip.size> acc;
            HEADWAY_UNROLL
            for (int c = 0; c < strip.size; ++c) {
              HEADWAY_UNROLL
              for (int v = 0; v < NV; ++v) {
                acc[c][v] = S::load(sums + ((first + c) * NV + v) * lanes);
              }
            }
            finish_strip<NV, strip.size, product>(acc, r + static_cast<int>(first), patch.vector_begin);
          });
    }
  }

  // ---- Strip by strip ----

  template <int NV, Product product>
  HEADWAY_NOINLINE void multiply_vectors(const Patch& patch) const {
    in_strips<broadcasts<S, NV>(), fold>(
        patch.row_end - patch.row_begin, [&](auto strip, std::int64_t r) HEADWAY_LAMBDA {
          multiply_strip<NV, strip.size, product>(static_cast<int>(patch.row_begin + r), patch.vector_begin);
        });
  }

  // NB rows from row r on against NV vectors of keys from vector `first` on.
  template <int NV, int NB, Product product>
  HEADWAY_INLINE void multiply_strip(int r, int first) const {
    const OperandRows<S>& rows = rows_of<product>();
    const Operand* vectors = panel_of<product>() + first * lanes;
    const std::int64_t dim = dim_of<product>();
    Accumulators<S, NV, NB> acc;
    // In the parts of multiply_in_chains_around: the same bits either way.
    add_in_parts<S, NV, NB>(
        acc, folded<S>(dim), product_chain<S>(dim), [&](std::ptrdiff_t begin, std::ptrdiff_t count) HEADWAY_LAMBDA {
          const Operand* scalars = rows.data + r * rows.ld + begin;
          if (begin == 0) {
            accumulate_fetching<S, NV, NB, Scalars::across>(acc, vectors, width, scalars, rows.ld, count,
                                                            [&](int c, int some)
                                                                HEADWAY_LAMBDA { fetch<product, NB>(r + c, some); });
          } else {
            accumulate<S, NV, NB, Scalars::across>(acc, vectors + begin * width, width, scalars, rows.ld, count);
          }
        });
    finish_strip<NV, NB, product>(acc, r, first);
  }

  // What follows from a strip's products.
  template <int NV, int NB, Product product>
  HEADWAY_INLINE void finish_strip(Accumulators<S, NV, NB>& acc, int r, int first) const {
    constexpr bool leaves = product == Product::weights || product == Product::gradients;
    const ScoreFactor<Scalar>& factor = weights_.factor;
    auto witness = Near::no_witness();
    OperandVector halves[2][(S::panel_vectors + 1) / 2];
    HEADWAY_UNROLL
    for (int c = 0; c < NB; ++c) {
      Vector row[NV];
      HEADWAY_UNROLL
      for (int v = 0; v < NV; ++v) {
        Scalar* weight = tile_.weights + (r + c) * width + (first + v) * lanes;
        Scalar* gradient = tile_.gradients + (r + c) * width + (first + v) * lanes;
        if constexpr (product == Product::scores) {
          S::store(weight, modified_ ? acc[c][v] * S::set(factor.power) * S::set(factor.rest) : acc[c][v]);
        } else if constexpr (product == Product::natural_weights) {
          S::store(weight, weights_.natural_weight(acc[c][v] * S::set(factor.power) * S::set(factor.rest), r + c));
        } else if constexpr (product == Product::weights) {
          acc[c][v] = weights_.exponent(acc[c][v], r + c);
          row[v] = hides ? Near::of(acc[c][v], witness) : exp2<S>(acc[c][v]);
          S::store(weight, row[v]);
        } else if constexpr (product == Product::raw_gradients) {
          S::store(gradient, acc[c][v]);
        } else {
          row[v] = S::load(weight) * (acc[c][v] - S::set(tile_.numbers.delta[r + c]));
          S::store(gradient, row[v]);
        }
      }
      if constexpr (fold > 1 && leaves && NV == S::panel_vectors) {
        HEADWAY_UNROLL
        for (int v = 0; v < NV; v += 2) {
          halves[c % 2][v / 2] = Operands<S>::rounded(row[v], row[v + 1]);
          if (c % 2 == 0 && c + 1 == NB) {
            halves[1][v / 2] = Operands<S>::zero();
          }
          if (keeps_pairs && (c % 2 == 1 || c + 1 == NB)) {
            tile_.pairs.template store<is_of_scores(product)>(r + c / 2 * 2, v, halves[0][v / 2], halves[1][v / 2]);
          }
        }
      }
    }
    if constexpr (hides && product == Product::weights) {
      if (__builtin_expect(S::any(Near::out_of_reach(witness, acc[0][0])), 0)) {
        HEADWAY_UNROLL
        for (int c = 0; c < NB; ++c) {
          HEADWAY_UNROLL
          for (int v = 0; v < NV; ++v) {
            S::store(tile_.weights + (r + c) * width + (first + v) * lanes, acc[c][v]);
          }
        }
        weigh_far({r, r + NB, first, first + NV});
      }
    }
  }

  // A patch's weights from their exponents, of which some are out of the fast exponential's reach.
  HEADWAY_NOINLINE void weigh_far(const Patch& patch) const {
    weights_.weigh_any(patch);
    if constexpr (fold > 1) {
      for (int r = patch.row_begin; keeps_pairs && r < patch.row_end; r += 2) {
        for (int v = 0; v < S::panel_vectors; v += 2) {
          tile_.pairs.template store<true>(r, v, tile_.rounded(tile_.weights, r, v),
                                           tile_.rounded(tile_.weights, r + 1, v));
        }
      }
    }
  }

  // ---- Strip by strip, each beside the products of the next ----

  // Whole strips, each with what follows from the products of the strip before between its own: see
  // multiply_in_chains_around. Returns how many rows are done.
  template <Product product>
  int overlapped(const Patch& patch) const {
    constexpr int least = 64;  // whose products hide what follows from others
    const bool full = patch.vector_end - patch.vector_begin == S::panel_vectors;
    const bool near = product != Product::weights || tile_.seen_far == nullptr || !*tile_.seen_far;
    const std::int64_t dim = dim_of<product>();
    return (fold == 1 ? full : keeps_pairs) && near && dim >= least && folded<S>(dim) <= widest_in_chains<S>
               ? overlapped_steps<product, least / fold>(patch, folded<S>(dim))
               : 0;
  }

  template <Product product, int steps>
  HEADWAY_NOINLINE int overlapped_steps(const Patch& patch, std::int64_t all_steps) const {
    constexpr int NV = S::panel_vectors;
    constexpr int NB = S::tile_scalars;
    constexpr bool of_scores = product == Product::weights;
    constexpr int jobs = NB / 2 * (of_scores ? NV : NV / 2);
    const OperandRows<S>& rows = rows_of<product>();
    const Operand* panel = panel_of<product>();
    const int end = patch.row_begin + (patch.row_end - patch.row_begin) / NB * NB;
    alignas(64) Scalar raw[NB * NV * lanes];
    auto witness = Near::no_witness();
    for (int r = patch.row_begin; r < end; r += NB) {
      fetch<product, 1>(r, NB);
      const Operand* scalars = rows.data + r * rows.ld;
      if (r == patch.row_begin) {
        multiply_in_chains_around<S, NV, NB, steps, 0>(raw, panel, width, scalars, rows.ld, all_steps - steps,
                                                       [](int) {});
      } else {
        multiply_in_chains_around<S, NV, NB, steps, jobs>(
            raw, panel, width, scalars, rows.ld, all_steps - steps,
            [&](int job) HEADWAY_LAMBDA { finish_part<product, NV>(raw, r - NB, job, witness); });
      }
    }
    if (end == patch.row_begin) {
      return 0;
    }
    HEADWAY_UNROLL
    for (int job = 0; job < jobs; ++job) {
      finish_part<product, NV>(raw, end - NB, job, witness);
    }
    if (of_scores && __builtin_expect(S::any(Near::out_of_reach(witness, S::zero())), 0)) {
      if (tile_.seen_far != nullptr) {
        *tile_.seen_far = true;
      }
      return 0;  // once more, strip by strip
    }
    return end - patch.row_begin;
  }

  // A part of a strip that starts at row r: two rows and a vector of weights, or two of gradients.
  template <Product product, int NV>
  HEADWAY_INLINE void finish_part(const Scalar* raw, int r, int job, typename Near::Witness& witness) const {
    if constexpr (product == Product::weights) {
      const int c = job / NV * 2;
      const int v = job % NV;
      Vector weights[2];
      HEADWAY_UNROLL
      for (int k = 0; k < 2; ++k) {
        const Vector product_of = S::load(raw + ((c + k) * NV + v) * lanes);
        weights[k] = Near::of(weights_.exponent(product_of, r + c + k), witness);
        S::store(tile_.weights + (r + c + k) * width + v * lanes, weights[k]);
      }
      if constexpr (fold > 1) {
        Operands<S>::store(tile_.pairs.weights + (r + c) / 2 * width + v * lanes,
                           Operands<S>::pairs(weights[0], weights[1]));
      }
    } else {
      const int c = job / (NV / 2) * 2;
      const int v = job % (NV / 2) * 2;
      OperandVector halves[2];
      HEADWAY_UNROLL
      for (int k = 0; k < 2; ++k) {
        const Vector delta = S::set(tile_.numbers.delta[r + c + k]);
        Vector gradients[2];
        HEADWAY_UNROLL
        for (int n = 0; n < 2; ++n) {
          const int at = (r + c + k) * width + (v + n) * lanes;
          gradients[n] = S::load(tile_.weights + at) * (S::load(raw + ((c + k) * NV + v + n) * lanes) - delta);
          if (fold == 1 || keeps_gradients) {
            S::store(tile_.gradients + at, gradients[n]);
          }
        }
        if constexpr (fold > 1) {
          halves[k] = Operands<S>::rounded(gradients[0], gradients[1]);
        }
      }
      if constexpr (fold > 1) {
        tile_.pairs.template store<false>(r + c, v, halves[0], halves[1]);
      }
    }
  }

  const BackwardArgs& args_;
  const Tile<S>& tile_;
  const TileWeights<S> weights_;  // a copy: the compiler would follow a reference again after each store
  const bool modified_;
};

}  // namespace
}  // namespace headway::cpu
