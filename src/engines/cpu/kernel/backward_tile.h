// One tile of the backward pass: a block of queries against a panel of keys, keys in lanes.
//   S = Q K^T, modified      P = 2^(S - lse)      dP = dO V^T      dS = P (dP - delta)
// K^T and V^T are packed panels whose rows are vectors; Q and dO are read in place, one broadcast at a time. P and dS
// leave as [rows][width] in the first- and second-level cache. The FMA units bound it: 2 (D + Dv) operations a pair
// against one exponential. P and dS come straight from the accumulators, which start at 0: subtracting lse and delta in
// the end is faster and more accurate than starting from them; where the vocabulary can, a strip's exponentials run
// between the next strip's products. Modifiers and dropout add passes over the tile.
// With bf16 dot products Q, K, dO and V are pairs along d, and P and dS leave as pairs too, straight from the registers
// where nothing changes them later.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/ahead.h"
#include "engines/cpu/kernel/backward_args.h"
#include "engines/cpu/kernel/backward_tile_data.h"
#include "engines/cpu/kernel/backward_tile_permission.h"
#include "engines/cpu/kernel/exp2.h"
#include "engines/cpu/kernel/key_lanes.h"
#include "engines/cpu/kernel/near_exp2.h"
#include "engines/cpu/kernel/operands.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/ranges.h"
#include "engines/cpu/kernel/row_blocks.h"
#include "engines/cpu/kernel/score_factor.h"
#include "engines/cpu/kernel/strips.h"
#include "engines/cpu/kernel/tile.h"
#include "engines/cpu/kernel/tile_products.h"

namespace headway::cpu {
namespace {

// P and dS of a tile of one head. dS is the gradient of the bias too; softcap's slopes come on top (apply_slopes).
template <class S>
class TileGradients {
 public:
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  static constexpr int lanes = S::lanes;
  static constexpr int width = S::lanes * S::panel_vectors;
  static constexpr int fold = Operands<S>::fold;
  // Dot products flush what is below 2^-126, so P and dS are 2^raised times as large there.
  static constexpr int raised = fold > 1 ? 32 : 0;
  static_assert(width <= 64 && width % 4 == 0, "a word holds a panel, and a Philox call decides about 4 of its keys");

  // Scores are in units of log2, or natural or divided by their cap for the modifiers. A cap does not count for what
  // K^T takes in: beside a large one K would lose its bits.
  static ScoreFactor<Scalar> factor_of(double scale, const Modifiers& modifiers) {
    ScoreFactor<Scalar> factor = score_factor<Scalar>(change_scores(modifiers) ? scale : scale * log2e, fold == 1);
    if (modifiers.softcap != 0) {
      const double packed = factor.packed == 0 ? 1 : static_cast<double>(factor.packed);
      const auto split = split_factor<Scalar>(scale / modifiers.softcap / packed);
      factor = {factor.packed, split.second, split.first};
    }
    return factor;
  }

  TileGradients(const BackwardArgs& args, const BackwardHead& head, const Tile<S>& tile)
      : args_(args),
        modifiers_(head.modifiers),
        dropout_(head.dropout),
        tile_(tile),
        permission_(head.ranges, head.modifiers, tile),
        factor_(factor_of(args.scale, head.modifiers)),
        keeps_gradients_(fold == 1 || head.dbias.data != nullptr) {}

  // Fills the tile's weights, gradients if `wanted`, allowed and spans. An `edge` has pairs outside the rows' ranges.
  // Returns whether any pair is forbidden.
  HEADWAY_NOINLINE bool run(bool edge, bool wanted) {
    gradients_wanted_ = wanted;
    keeps_pairs_ = fold > 1 && !edge && !change_scores(modifiers_) && !dropout_.active && tile_.wanted == nullptr &&
                   tile_.place.keys == width;
    if (edge) {
      cut_by_ranges();
      return true;
    }
    const Patch all{0, tile_.place.rows, 0, vectors()};
    permission_.take_all(all);
    compute(all, permission_.may_forbid());
    return permission_.any_forbidden(all);
  }

  // Fills `weights` with the scores as they are before the exponential, or where nothing modifies them with the
  // products that the factor makes scores of, and `gradients` with dO V^T. Both mean nothing where `allowed` is 0.
  HEADWAY_NOINLINE void run_products(bool edge) {
    only_products_ = true;
    run(edge, true);
  }

  // dS is the gradient of capped scores; the products that follow want that of the scores before.
  HEADWAY_NOINLINE void apply_slopes() {
    each_vector({0, tile_.place.rows, 0, vectors()}, [&](int r, int at, int shift) HEADWAY_LAMBDA {
      const Vector product = S::load(tile_.gradients + at) * S::load(tile_.slopes + at);
      S::store(tile_.gradients + at, S::select(S::mask_from_bits(tile_.allowed[r] >> shift), product, S::zero()));
    });
  }

  // The pairs, where they did not leave the registers as such.
  HEADWAY_NOINLINE void make_pairs() {
    if (keeps_pairs_) {
      return;
    }
    for (int r = 0; r < tile_.place.rows; r += 2) {
      for (int v = 0; v < S::panel_vectors; v += 2) {
        tile_.pairs.template store<true>(r, v, tile_.rounded(tile_.weights, r, v),
                                         tile_.rounded(tile_.weights, r + 1, v));
        if (gradients_wanted_) {
          tile_.pairs.template store<false>(r, v, tile_.rounded(tile_.gradients, r, v),
                                            tile_.rounded(tile_.gradients, r + 1, v));
        }
      }
    }
  }

 private:
  using Near = NearExp2<S, raised>;
  // Whether exponentials take the short way where they can, and hide between products.
  static constexpr bool hides = LooksUpPowers<S>;
  using Operand = typename Operands<S>::Scalar;
  using OperandVector = typename Operands<S>::Vector;
  // Natural weights are those of scores that nothing but a mask changes.
  enum class Product { scores, weights, natural_weights, raw_gradients, gradients };
  static constexpr bool is_of_scores(Product product) {
    return product == Product::scores || product == Product::weights || product == Product::natural_weights;
  }

  int vectors() const { return permission_.vectors(); }

  // body(row, offset of the vector in the tile, shift of its bits in the row's words)
  template <class Body>
  HEADWAY_INLINE static void each_vector(const Patch& patch, const Body& body) {
    for (int r = patch.row_begin; r < patch.row_end; ++r) {
      for (int v = patch.vector_begin; v < patch.vector_end; ++v) {
        body(r, r * width + v * lanes, v * lanes);
      }
    }
  }

  // ---- Which vectors ----

  // Groups of rows, each with the vectors that it reaches; neighbours that reach all keys go together.
  void cut_by_ranges() {
    Patch full{0, 0, 0, vectors()};
    for (int r = 0; r < tile_.place.rows; r += edge_rows) {
      Patch patch{r, at_most(tile_.place.rows, r + edge_rows), 0, 0};
      if (permission_.cut_group(patch)) {
        full.row_begin = full.row_begin == full.row_end ? patch.row_begin : full.row_begin;
        full.row_end = patch.row_end;
        continue;
      }
      compute_full(full);
      compute(patch, true);
      clear_outside(patch);
    }
    compute_full(full);
  }

  void compute_full(Patch& full) {
    if (full.row_begin < full.row_end) {
      compute(full, permission_.may_forbid());
    }
    full.row_begin = full.row_end = 0;
  }

  void clear_outside(const Patch& patch) {
    const Patch sides[] = {{patch.row_begin, patch.row_end, 0, patch.vector_begin},
                           {patch.row_begin, patch.row_end, patch.vector_end, vectors()}};
    for (const Patch& outside : sides) {
      each_vector(outside, [&](int, int at, int) HEADWAY_LAMBDA {
        S::store(tile_.weights + at, S::zero());
        S::store(tile_.gradients + at, S::zero());
      });
    }
  }

  // ---- The numbers of a patch ----

  HEADWAY_NOINLINE void compute(const Patch& patch, bool may_forbid) {
    if (only_products_) {
      compute_scores(patch);
      multiply<Product::raw_gradients>(patch);
      return;
    }
    if (fold == 1 && only_masks_scores()) {
      multiply<Product::natural_weights>(patch);
    } else if (change_scores(modifiers_)) {
      compute_scores(patch);
      exponentiate(patch);
    } else if (tile_.references != nullptr || factor_.power != 1) {
      compute_scores(patch);
      weigh_from_references(patch);
    } else {
      multiply<Product::weights>(patch);
    }
    const bool forbids = may_forbid && permission_.any_forbidden(patch);
    if (forbids) {
      forbid(patch, tile_.weights);
    }
    if (gradients_wanted_) {
      dropout_.active ? multiply<Product::raw_gradients>(patch) : multiply<Product::gradients>(patch);
    }
    if (dropout_.active) {
      drop(patch);
    }
    if (forbids && gradients_wanted_) {
      forbid(patch, tile_.gradients);
    }
  }

  // Modified scores, or products.
  void compute_scores(const Patch& patch) {
    multiply<Product::scores>(patch);
    if (change_scores(modifiers_)) {
      KeyLaneModifier<S>(modifiers_, args_.ranges)
          .apply(tile_.place, patch, tile_.weights, tile_.slopes, tile_.allowed);
    }
  }

  bool only_masks_scores() const {
    return change_scores(modifiers_) && modifiers_.softcap == 0 && !modifiers_.has_alibi &&
           modifiers_.bias.data == nullptr;
  }

  Vector reference(int row) const { return tile_.references == nullptr ? S::zero() : S::set(tile_.references[row]); }

  void exponentiate(const Patch& patch) {
    each_vector(patch, [&](int r, int at, int) HEADWAY_LAMBDA {
      S::store(tile_.weights + at, natural_weight(S::load(tile_.weights + at), r));
    });
  }
  HEADWAY_INLINE Vector natural_weight(Vector score, int row) const {
    const Vector x = (score - reference(row)) - S::set(tile_.lse[row]);
    return exp2<S, raised>(not_above_0(x) * S::set(static_cast<Scalar>(log2e)));
  }

  // Weights from products, for rows with references and factors beyond the type's range; any other row gets the bits
  // that it gets without them.
  HEADWAY_NOINLINE void weigh_from_references(const Patch& patch) {
    const Vector power = S::set(factor_.power);
    each_vector(patch, [&](int r, int at, int) HEADWAY_LAMBDA {
      S::store(tile_.weights + at, exponent((S::load(tile_.weights + at) - reference(r)) * power, r));
    });
    weigh_any(patch);
  }

  void forbid(const Patch& patch, Scalar* numbers) {
    each_vector(patch, [&](int r, int at, int shift) HEADWAY_LAMBDA {
      const auto allowed = S::mask_from_bits(tile_.allowed[r] >> shift);
      S::store(numbers + at, S::select(allowed, S::load(numbers + at), S::zero()));
    });
  }

  // dS = P (keep dP / (1 - p) - delta) and P = keep P. Products, so that what is NaN stays NaN.
  void drop(const Patch& patch) {
    for (int r = patch.row_begin; r < patch.row_end; ++r) {
      tile_.kept[r] = kept_word<S>(dropout_, tile_.place.row_begin + r, tile_.place.key_begin, tile_.place.keys);
    }
    const Vector kept_scale = S::set(static_cast<Scalar>(dropout_.kept_scale));
    each_vector(patch, [&](int r, int at, int shift) HEADWAY_LAMBDA {
      const auto kept = S::mask_from_bits(tile_.kept[r] >> shift);
      const Vector weight = S::load(tile_.weights + at);
      const Vector product = S::load(tile_.gradients + at) * S::select(kept, kept_scale, S::zero());
      S::store(tile_.gradients + at, weight * (product - S::set(tile_.delta[r])));
      S::store(tile_.weights + at, weight * S::select(kept, S::set(1), S::zero()));
    });
  }

  // ---- Products ----

  template <Product product>
  void multiply(Patch patch) {
    if constexpr (HasTiles<S>) {
      with_vectors<S::panel_vectors>(patch.vector_end - patch.vector_begin,
                                     [&]<int NV>(Strip<NV>) { multiply_by_tiles<NV, product>(patch); });
      return;
    }
    if constexpr (hides && (product == Product::weights || product == Product::gradients)) {
      patch.row_begin += overlapped<product>(patch);
    }
    switch (patch.vector_end - patch.vector_begin) {
      case 0: break;
      case 1: multiply_vectors<1, product>(patch); break;
      case 2: multiply_vectors<2, product>(patch); break;
      case 3: multiply_vectors<3, product>(patch); break;
      default: multiply_vectors<S::panel_vectors, product>(patch); break;
    }
  }

  // 32 rows at a time, those of the next ones before what follows from the products of these, so that the one hides
  // behind the other.
  template <int NV, Product product>
  HEADWAY_NOINLINE void multiply_by_tiles(const Patch& patch) {
    constexpr bool of_scores = is_of_scores(product);
    constexpr int at_once = 2 * tile_side;
    const OperandRows<S>& rows = of_scores ? tile_.query : tile_.grad_out;
    const Operand* vectors = (of_scores ? tile_.key_panel : tile_.value_panel) + patch.vector_begin * lanes;
    const std::int64_t steps = folded<S>(of_scores ? args_.head_dim : args_.value_dim) / tile_pairs;
    alignas(64) Scalar raw[2][at_once * NV * lanes];
    const auto products = [&](int r, int side) HEADWAY_LAMBDA {
      (of_scores ? tile_.query_ahead : tile_.grad_out_ahead)->fetch(r, at_once);
      (of_scores ? tile_.mask_ahead : tile_.bias_ahead)->fetch(r, at_once);
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

  template <int NV, Product product>
  HEADWAY_NOINLINE void multiply_vectors(const Patch& patch) {
    in_strips<broadcasts<S, NV>(), fold>(
        patch.row_end - patch.row_begin, [&](auto strip, std::int64_t r) HEADWAY_LAMBDA {
          multiply_strip<NV, strip.size, product>(static_cast<int>(patch.row_begin + r), patch.vector_begin);
        });
  }

  // Whole strips, each with what follows from the products of the strip before between its own: see
  // multiply_in_chains_around. Returns how many rows are done.
  template <Product product>
  int overlapped(const Patch& patch) {
    constexpr int least = 64;  // whose products hide what follows from others
    const bool full = patch.vector_end - patch.vector_begin == S::panel_vectors;
    const bool near = product != Product::weights || tile_.seen_far == nullptr || !*tile_.seen_far;
    const std::int64_t dim = product == Product::weights ? args_.head_dim : args_.value_dim;
    return (fold == 1 ? full : keeps_pairs_) && near && dim >= least && folded<S>(dim) <= widest_in_chains<S>
               ? overlapped_steps<product, least / fold>(patch, folded<S>(dim))
               : 0;
  }

  template <Product product, int steps>
  HEADWAY_NOINLINE int overlapped_steps(const Patch& patch, std::int64_t all_steps) {
    constexpr int NV = S::panel_vectors;
    constexpr int NB = S::tile_scalars;
    constexpr bool of_scores = product == Product::weights;
    constexpr int jobs = NB / 2 * (of_scores ? NV : NV / 2);
    const OperandRows<S>& rows = of_scores ? tile_.query : tile_.grad_out;
    const Operand* panel = of_scores ? tile_.key_panel : tile_.value_panel;
    const int end = patch.row_begin + (patch.row_end - patch.row_begin) / NB * NB;
    alignas(64) Scalar raw[NB * NV * lanes];
    auto witness = Near::no_witness();
    for (int r = patch.row_begin; r < end; r += NB) {
      (of_scores ? tile_.query_ahead : tile_.grad_out_ahead)->fetch(r, NB);
      (of_scores ? tile_.mask_ahead : tile_.bias_ahead)->fetch(r, NB);
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
  HEADWAY_INLINE void finish_part(const Scalar* raw, int r, int job, typename Near::Witness& witness) {
    if constexpr (product == Product::weights) {
      const int c = job / NV * 2;
      const int v = job % NV;
      Vector weights[2];
      HEADWAY_UNROLL
      for (int k = 0; k < 2; ++k) {
        const Vector product_of = S::load(raw + ((c + k) * NV + v) * lanes);
        weights[k] = Near::of(exponent(product_of, r + c + k), witness);
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
        const Vector delta = S::set(tile_.delta[r + c + k]);
        Vector gradients[2];
        HEADWAY_UNROLL
        for (int n = 0; n < 2; ++n) {
          const int at = (r + c + k) * width + (v + n) * lanes;
          gradients[n] = S::load(tile_.weights + at) * (S::load(raw + ((c + k) * NV + v + n) * lanes) - delta);
          if (keeps_gradients_) {
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

  // NB rows from row r on against NV vectors of keys from vector `first` on.
  template <int NV, int NB, Product product>
  HEADWAY_INLINE void multiply_strip(int r, int first) {
    constexpr bool of_scores = is_of_scores(product);
    const OperandRows<S>& rows = of_scores ? tile_.query : tile_.grad_out;
    Accumulators<S, NV, NB> acc;
    const auto fetch = [&](int c, int count) HEADWAY_LAMBDA {
      (of_scores ? tile_.query_ahead : tile_.grad_out_ahead)->template fetch<fetched_locality<NB>()>(r + c, count);
      (of_scores ? tile_.mask_ahead : tile_.bias_ahead)->fetch(r + c, count);
    };
    const Operand* vectors = (of_scores ? tile_.key_panel : tile_.value_panel) + first * lanes;
    // In the parts of multiply_in_chains_around: the same bits either way.
    const std::int64_t dim = of_scores ? args_.head_dim : args_.value_dim;
    add_in_parts<S, NV, NB>(
        acc, folded<S>(dim), product_chain<S>(dim), [&](std::ptrdiff_t begin, std::ptrdiff_t count) HEADWAY_LAMBDA {
          const Operand* scalars = rows.data + r * rows.ld + begin;
          if (begin == 0) {
            accumulate_fetching<S, NV, NB, Scalars::across>(acc, vectors, width, scalars, rows.ld, count, fetch);
          } else {
            accumulate<S, NV, NB, Scalars::across>(acc, vectors + begin * width, width, scalars, rows.ld, count);
          }
        });
    finish_strip<NV, NB, product>(acc, r, first);
  }

  // What follows from a strip's products.
  template <int NV, int NB, Product product>
  HEADWAY_INLINE void finish_strip(Accumulators<S, NV, NB>& acc, int r, int first) {
    constexpr bool of_scores = is_of_scores(product);
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
          S::store(weight,
                   change_scores(modifiers_) ? acc[c][v] * S::set(factor_.power) * S::set(factor_.rest) : acc[c][v]);
        } else if constexpr (product == Product::natural_weights) {
          S::store(weight, natural_weight(acc[c][v] * S::set(factor_.power) * S::set(factor_.rest), r + c));
        } else if constexpr (product == Product::weights) {
          acc[c][v] = exponent(acc[c][v], r + c);
          row[v] = hides ? Near::of(acc[c][v], witness) : exp2<S>(acc[c][v]);
          S::store(weight, row[v]);
        } else if constexpr (product == Product::raw_gradients) {
          S::store(gradient, acc[c][v]);
        } else {
          row[v] = S::load(weight) * (acc[c][v] - S::set(tile_.delta[r + c]));
          S::store(gradient, row[v]);
        }
      }
      constexpr bool leaves = product == Product::weights || product == Product::gradients;
      if constexpr (fold > 1 && leaves && NV == S::panel_vectors) {
        HEADWAY_UNROLL
        for (int v = 0; v < NV; v += 2) {
          halves[c % 2][v / 2] = Operands<S>::rounded(row[v], row[v + 1]);
          if (c % 2 == 0 && c + 1 == NB) {
            halves[1][v / 2] = Operands<S>::zero();
          }
          if (keeps_pairs_ && (c % 2 == 1 || c + 1 == NB)) {
            tile_.pairs.template store<of_scores>(r + c / 2 * 2, v, halves[0][v / 2], halves[1][v / 2]);
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
        weigh_any({r, r + NB, first, first + NV});
      }
    }
  }

  // Of a product of a row's. No weight is above 1, however lse was rounded.
  HEADWAY_INLINE Vector exponent(Vector product, int row) const {
    return not_above_0(S::fma(product, S::set(factor_.rest), S::set(-tile_.lse[row])));
  }
  HEADWAY_INLINE static Vector not_above_0(Vector x) { return S::min(S::zero(), x); }  // NaN passes

  // A patch's weights from their exponents: those out of the fast exponential's reach with that of any number, the
  // others with the same bits as before.
  HEADWAY_NOINLINE void weigh_any(const Patch& patch) {
    each_vector(patch, [&](int, int at, int) HEADWAY_LAMBDA {
      const Vector x = S::load(tile_.weights + at);
      if constexpr (hides) {
        auto witness = Near::no_witness();
        const Vector near = Near::of(x, witness);
        S::store(tile_.weights + at, S::select(Near::out_of_reach(witness, near), exp2<S, raised>(x), near));
      } else {
        S::store(tile_.weights + at, exp2<S, raised>(x));
      }
    });
    if constexpr (fold > 1) {
      for (int c = patch.row_begin; keeps_pairs_ && c < patch.row_end; c += 2) {
        for (int v = 0; v < S::panel_vectors; v += 2) {
          tile_.pairs.template store<true>(c, v, tile_.rounded(tile_.weights, c, v),
                                           tile_.rounded(tile_.weights, c + 1, v));
        }
      }
    }
  }

  const BackwardArgs& args_;
  const Modifiers& modifiers_;
  const DropoutRule& dropout_;
  const Tile<S>& tile_;
  const TilePermission<S> permission_;
  ScoreFactor<Scalar> factor_;
  bool only_products_ = false;
  bool gradients_wanted_ = true;
  bool keeps_gradients_;      // whether someone reads them as scalars
  bool keeps_pairs_ = false;  // whether pairs leave the registers as such
};

}  // namespace
}  // namespace headway::cpu
