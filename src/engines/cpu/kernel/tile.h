// The one loop that does the arithmetic: an outer-product tile held in registers.
//
//   acc[c][v] += sum over t of  scalar(c, t) * vector(t, v)        c < NB broadcasts, v < NV vectors
//
// Vectors lie in rows of a packed panel, [t][width]. Scalars are read in place from a row-major matrix: `across` takes
// scalar(c, t) = x[c * ld + t] (keys for the scores), `along` takes x[t * ld + c] (values for the output). Each step
// loads NV vectors and NB scalars for NB * NV FMAs, so with 4 x 4 the loads stay below half of the FMAs and the FMA
// units bound it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engines/cpu/kernel/compensated.h"
#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

enum class Scalars { across, along };

// What a vocabulary multiplies: its own scalars, one at a time, unless it says otherwise. A vocabulary that multiplies
// pairs specialises this with fold 2, and `steps`, `ld` and `width` below count pairs.
template <class S>
struct Operands {
  static constexpr int fold = 1;
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  HEADWAY_INLINE static Vector load(const Scalar* p) { return S::load(p); }
  HEADWAY_INLINE static Vector broadcast(const Scalar* p) { return S::set(*p); }
  HEADWAY_INLINE static typename S::Vector multiply_add(Vector a, Vector b, typename S::Vector c) {
    return S::fma(a, b, c);
  }
  HEADWAY_INLINE static void clear_part(Scalar* p, int) { *p = 0; }
  struct Magnitudes {};  // products of scalars are exact for numbers of any size
};

template <class S, int NV, int NB>
using Accumulators = typename S::Vector[NB][NV];

template <class S, int NV, int NB>
HEADWAY_INLINE void clear(Accumulators<S, NV, NB>& acc) {
  HEADWAY_UNROLL
  for (int c = 0; c < NB; ++c) {
    HEADWAY_UNROLL
    for (int v = 0; v < NV; ++v) {
      acc[c][v] = S::zero();
    }
  }
}

template <class S, int NV, int NB, Scalars layout>
HEADWAY_INLINE void accumulate(Accumulators<S, NV, NB>& acc, const typename Operands<S>::Scalar* __restrict vectors,
                               std::ptrdiff_t width, const typename Operands<S>::Scalar* __restrict scalars,
                               std::ptrdiff_t ld, std::ptrdiff_t steps) {
  using Operand = Operands<S>;
  // Across, one address serves four rows, or the addresses of many rows would not fit the machine's registers.
  constexpr int groups = layout == Scalars::across ? (NB + 3) / 4 : 1;
  const typename Operand::Scalar* first[groups];
  HEADWAY_UNROLL
  for (int g = 0; g < groups; ++g) {
    first[g] = scalars + 4 * g * ld;
  }
  _Pragma("GCC unroll 2") for (std::ptrdiff_t t = 0; t < steps; ++t) {
    typename Operand::Vector x[NV];
    HEADWAY_UNROLL
    for (int v = 0; v < NV; ++v) {
      x[v] = Operand::load(vectors + v * S::lanes);
    }
    HEADWAY_UNROLL
    for (int c = 0; c < NB; ++c) {
      const typename Operand::Vector b =
          Operand::broadcast(layout == Scalars::across ? first[c / 4] + c % 4 * ld : first[0] + c);
      HEADWAY_UNROLL
      for (int v = 0; v < NV; ++v) {
        acc[c][v] = Operand::multiply_add(b, x[v], acc[c][v]);
      }
    }
    vectors += width;
    HEADWAY_UNROLL
    for (int g = 0; g < groups; ++g) {
      first[g] += layout == Scalars::across ? 1 : ld;
      if constexpr (groups > 2) {
        asm("" : "+r"(first[g]));  // or the compiler makes an address of its own for every row again
      }
    }
  }
}

// The same, with fetch(first, count) on the way for some of NB rows at a time. Memory answers only so many requests at
// once, and products wait while no line-fill buffer is free: a tile of many rows prefetches them bit by bit.
template <class S, int NV, int NB, Scalars layout, class Fetch>
HEADWAY_INLINE void accumulate_fetching(Accumulators<S, NV, NB>& acc, const typename Operands<S>::Scalar* vectors,
                                        std::ptrdiff_t width, const typename Operands<S>::Scalar* scalars,
                                        std::ptrdiff_t ld, std::ptrdiff_t steps, const Fetch& fetch) {
  constexpr int parts = NB > 4 ? NB / 4 : 1;
  for (int part = 0; part < parts; ++part) {
    fetch(part * (NB / parts), NB / parts);
    const std::ptrdiff_t begin = steps * part / parts;
    const std::ptrdiff_t end = steps * (part + 1) / parts;
    accumulate<S, NV, NB, layout>(acc, vectors + begin * width, width,
                                  scalars + begin * (layout == Scalars::across ? 1 : ld), ld, end - begin);
  }
}

// body(acc[c][v], the offset of its lanes in a tile).
template <class S, int NV, int NB, class Body>
HEADWAY_INLINE void each_sum(Accumulators<S, NV, NB>& acc, const Body& body) {
  HEADWAY_UNROLL
  for (int c = 0; c < NB; ++c) {
    HEADWAY_UNROLL
    for (int v = 0; v < NV; ++v) {
      body(acc[c][v], (c * NV + v) * S::lanes);
    }
  }
}

// acc = the sums of part(begin, count), which adds that many of `steps` terms to acc; none adds more than `longest`,
// so that no chain of additions is longer. Where there are more parts than that, what is lost between them counts too.
template <class S, int NV, int NB, class Part>
HEADWAY_INLINE void add_in_parts(Accumulators<S, NV, NB>& acc, std::ptrdiff_t steps, std::ptrdiff_t longest,
                                 const Part& part) {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  alignas(64) Scalar sums[2 * NB * NV * S::lanes];
  Scalar* const lost = sums + NB * NV * S::lanes;
  const bool many = __builtin_expect(steps > longest * longest, 0);
  clear<S, NV, NB>(acc);
  for (std::ptrdiff_t begin = 0; begin < steps; begin += longest) {
    if (begin == longest) {
      each_sum<S, NV, NB>(acc, [&](Vector& sum, int at) HEADWAY_LAMBDA { S::store(sums + at, sum); });
      clear<S, NV, NB>(acc);
    } else if (begin > 0 && !many) {
      each_sum<S, NV, NB>(acc,
                          [&](Vector& sum, int at) HEADWAY_LAMBDA { S::store(sums + at, S::load(sums + at) + sum); });
      clear<S, NV, NB>(acc);
    } else if (begin > 0) {
      each_sum<S, NV, NB>(acc, [&](Vector& sum, int at) HEADWAY_LAMBDA {
        const Compensated<S> next(S::load(sums + at), sum);
        S::store(sums + at, next.sum);
        S::store(lost + at, begin == 2 * longest ? next.lost : S::load(lost + at) + next.lost);
      });
      clear<S, NV, NB>(acc);
    }
    part(begin, steps - begin < longest ? steps - begin : longest);
  }
  if (many) {
    each_sum<S, NV, NB>(
        acc, [&](Vector& sum, int at) HEADWAY_LAMBDA { sum = S::load(sums + at) + (S::load(lost + at) + sum); });
  } else if (steps > longest) {
    each_sum<S, NV, NB>(acc, [&](Vector& sum, int at) HEADWAY_LAMBDA { sum = S::load(sums + at) + sum; });
  }
}

// How many steps of products of a query and a key are added up one by one: a long chain of equal products would leave
// the bound on scores. Products of bf16 have so few bits that 256 equal ones add up exactly. Heads of 32 to 63 have
// chains of 32, which may be 1.2 times the bound: shorter ones cost them a seventh of their speed.
constexpr int short_product_chain = 16;
template <class S>
constexpr int product_chain(std::int64_t head_dim) {
  return Operands<S>::fold > 1 ? 128 : head_dim >= 32 && head_dim < 64 ? 32 : short_product_chain;
}

// The most steps that are not too many chains for multiply_in_chains_around.
template <class S>
constexpr std::int64_t widest_in_chains = Operands<S>::fold > 1 ? 128 * 128 : short_product_chain* short_product_chain;

// That there are no more steps, known when it is compiled.
struct NoMore {
  constexpr operator std::ptrdiff_t() const { return 0; }  // NOLINT(google-explicit-constructor)
};

// products[c][v] += acc[c][v], or = it.
template <class S, int NV, int NB>
HEADWAY_INLINE void sum_up(const Accumulators<S, NV, NB>& acc, typename S::Scalar* products, bool first) {
  HEADWAY_UNROLL
  for (int c = 0; c < NB; ++c) {
    HEADWAY_UNROLL
    for (int v = 0; v < NV; ++v) {
      typename S::Scalar* at = products + (c * NV + v) * S::lanes;
      S::store(at, first ? acc[c][v] : S::load(at) + acc[c][v]);
    }
  }
}

// products[c][v] = the sums of a tile from 0 on, `steps` + `more` long with `scalars` across, and job(0) ... job(jobs -
// 1) done on the way through the first `steps`. What waits more than it multiplies, like the exponentials of the tile
// before, hides between the products; the compiler must know how many steps there are to hide it between.
//
// Chains of additions are as long as product_chain() says, for heads up to widest_in_chains. Tiles whose `steps` are
// several chains go by in parts of NB / 2, which leaves registers for the sums of chains: in memory they cost a tenth.
template <class S, int NV, int NB, int steps, int jobs, class More, class Job>
HEADWAY_INLINE void multiply_in_chains_around(typename S::Scalar* products, const typename Operands<S>::Scalar* vectors,
                                              std::ptrdiff_t width, const typename Operands<S>::Scalar* scalars,
                                              std::ptrdiff_t ld, More more, const Job& job) {
  constexpr int longest = product_chain<S>(steps * Operands<S>::fold);
  constexpr int chain = steps < longest ? steps : longest;
  constexpr int rows = chain < steps ? NB / 2 : NB;
  constexpr int all_steps = steps * (NB / rows);
  // From jobs to the next ones: at least 4 steps, of which the compiler makes a loop and keeps the sums in registers.
  constexpr int least = 4, apart = jobs == 0 ? chain : all_steps / jobs > least ? all_steps / jobs : least;
  constexpr int together = jobs * apart / all_steps;
  constexpr int between = apart < chain ? apart : chain;
  static_assert(together * all_steps == jobs * apart && steps % chain == 0 && chain % between == 0 &&
                apart % between == 0);
  HEADWAY_UNROLL
  for (int part = 0; part < NB / rows; ++part) {
    const typename Operands<S>::Scalar* part_scalars = scalars + part * rows * ld;
    typename S::Scalar* part_products = products + part * rows * NV * S::lanes;
    Accumulators<S, NV, rows> acc, total;
    HEADWAY_UNROLL
    for (int begin = 0; begin < steps; begin += between) {
      if (begin % chain == 0) {
        clear<S, NV, rows>(acc);
      }
      accumulate<S, NV, rows, Scalars::across>(acc, vectors + begin * width, width, part_scalars + begin, ld, between);
      if (const int done = part * steps + begin + between; done % apart == 0) {
        HEADWAY_UNROLL
        for (int n = 0; n < together; ++n) {
          job((done / apart - 1) * together + n);
        }
      }
      if ((begin + between) % chain == 0 && chain < steps) {
        HEADWAY_UNROLL
        for (int c = 0; c < rows; ++c) {
          HEADWAY_UNROLL
          for (int v = 0; v < NV; ++v) {
            total[c][v] = begin < chain ? acc[c][v] : total[c][v] + acc[c][v];
          }
        }
      }
    }
    // What is left of a chain, then chains.
    std::ptrdiff_t done = more < longest - chain ? steps + more : steps + longest - chain;
    if constexpr (chain < steps) {
      sum_up<S, NV, rows>(total, part_products, true);
    } else {
      accumulate<S, NV, rows, Scalars::across>(acc, vectors + steps * width, width, part_scalars + steps, ld,
                                               done - steps);
      sum_up<S, NV, rows>(acc, part_products, true);
    }
    for (; done < steps + more; done += longest) {
      const std::ptrdiff_t left = steps + more - done;
      clear<S, NV, rows>(acc);
      accumulate<S, NV, rows, Scalars::across>(acc, vectors + done * width, width, part_scalars + done, ld,
                                               left < longest ? left : longest);
      sum_up<S, NV, rows>(acc, part_products, false);
    }
  }
}

}  // namespace
}  // namespace headway::cpu
