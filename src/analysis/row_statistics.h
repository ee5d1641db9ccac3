// Sums over one row of weights, vectorised for this machine. The order of the additions is fixed, so the bits are the
// same for every vector width.
#pragma once

#include <cstdint>

namespace headway {

// The weights p[begin..end) of a row; those outside are 0.
template <class T>
struct WeightRow {
  const T* p;
  std::int64_t begin, end;
};

struct RowSums {
  double entropy = 0;   // -sum p log p
  double distance = 0;  // sum p |position - j|
};

// The largest weights of a row so far, and their keys: a short list in order.
template <class T>
struct TopList {
  std::int64_t* keys;
  T* weights;
  std::int64_t size;  // of the list
  std::int64_t filled = 0;

  T threshold() const { return filled < size ? T{0} : weights[size - 1]; }
  void offer(std::int64_t key, T weight);
};

template <class T>
RowSums sum_row(const WeightRow<T>& row, std::int64_t position, TopList<T>& top);

// Scores to weights in place: p = exp(s - lse), 0 for a score of -inf. Returns their sum.
template <class T>
double exponentiate(T* scores, std::int64_t count, T lse);

template <class T>
double sum_between(const WeightRow<T>& row, std::int64_t begin, std::int64_t end);

// received[j] += p[j]
template <class T>
void add_received(const WeightRow<T>& row, double* received);

// For each cell of `cell` keys, starting at key 0 of the row: sums[c] += its weights, highest[c] = their maximum with
// highest[c].
template <class T>
void add_cells(const WeightRow<T>& row, std::int64_t cell, double* sums, T* highest);

}  // namespace headway
