// The pieces of an online softmax that every forward kernel shares.
#pragma once

#include "engines/cuda/elements.cuh"

namespace headway::cuda {

// exp(x) for x <= 0, and for NaN. Accurate to a few units in the last place; denormal results are kept.
__device__ inline float exponential(float x) { return exp2f(x * 1.4426950408889634f); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }

template <class Real>
__device__ inline Real higher(Real a, Real b) {
  return a > b ? a : b;  // a NaN makes its row NaN, here or in the sum
}

// What exponents are taken relative to: 0 while a row has seen no key, so that -inf - reference stays -inf.
template <class Real>
__device__ inline Real reference(Real highest) {
  return highest == -infinity<Real>() ? Real(0) : highest;
}

// A row's statistics: the highest score, and the sum of exp(score - highest).
template <class Real>
struct RowSoftmax {
  Real highest = -infinity<Real>();
  Real total = 0;

  // Takes a higher reference into account; returns what sums so far are multiplied by.
  __device__ Real raise(Real candidate) {
    const Real next = higher(highest, candidate);
    const Real factor = exponential(highest - reference(next));
    highest = next;
    total *= factor;
    return factor;
  }

  // The sink joins the sum like a key without value; an infinite one has all weight. Returns what sums of values are
  // multiplied by for it.
  __device__ Real add_sink(Real sink) {
    const Real factor = raise(sink);
    total += sink == infinity<Real>() ? Real(1) : exponential(sink - reference(highest));
    return factor;
  }

  // Keys are allowed, and all their scores are -inf (modifiers.cuh).
  __device__ bool all_vanish() const { return highest == -Limits<Real>::highest && total == total; }

  // No key was allowed: not even one whose weight vanishes, since the highest one weighs 1.
  __device__ bool empty() const { return total == 0; }

  // log(total) + highest, kept finite where the scores are: the backward subtracts it.
  __device__ Real lse() const {
    constexpr Real most = Limits<Real>::highest;
    const Real value = highest + logarithm(total);
    if (highest >= -most && highest <= most) {
      return value > most ? most : value < -most ? -most : value;
    }
    return value;
  }
};

// The closing of a row: the sink joins the sum, and what out is divided by and lse become known.
template <class Real>
struct RowEnd {
  Real factor;  // out = sum * factor
  Real lse;
};

template <class Real>
__device__ inline RowEnd<Real> close_row(RowSoftmax<Real> row, Real sink, bool padding) {
  if (row.empty()) {
    return {0, padding ? -infinity<Real>() : sink};
  }
  if (row.all_vanish()) {  // 0 / 0, but for a sink
    const Real nan = infinity<Real>() - infinity<Real>();
    return sink > -infinity<Real>() ? RowEnd<Real>{0, sink} : RowEnd<Real>{nan, nan};
  }
  const Real rescaled = row.add_sink(sink);
  return {rescaled / row.total, row.lse()};
}

}  // namespace headway::cuda
