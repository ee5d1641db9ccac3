// Each loop is written once, over vectors of 64 bytes that the compiler splits where the machine's are shorter; on x86
// it is compiled for each width and chosen at run time. Every loop reads a row of weights that is still in the cache.
#include "analysis/row_statistics.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

namespace headway {
namespace {

#define HEADWAY_ALWAYS_INLINE __attribute__((always_inline)) inline

template <class T>
struct Wide;
template <>
struct Wide<float> {
  typedef float Vector __attribute__((vector_size(64)));
  typedef std::int32_t Integers __attribute__((vector_size(64)));
  static constexpr int lanes = 16, mantissa_bits = 23, log_terms = 5, exp_terms = 8, bias = 127;
  static constexpr std::int32_t half_root = 0x3f3504f3;  // the bits of sqrt(1/2)
};
template <>
struct Wide<double> {
  typedef double Vector __attribute__((vector_size(64)));
  typedef std::int64_t Integers __attribute__((vector_size(64)));
  static constexpr int lanes = 8, mantissa_bits = 52, log_terms = 11, exp_terms = 14, bias = 1023;
  static constexpr std::int64_t half_root = 0x3fe6a09e667f3bcd;
};

constexpr std::int64_t block_keys = 256;  // summed in T, then added to a double

template <class T>
HEADWAY_ALWAYS_INLINE void load(typename Wide<T>::Vector& vector, const T* from, std::int64_t count) {
  if (count >= Wide<T>::lanes) {
    std::memcpy(&vector, from, sizeof vector);
  } else {
    vector = typename Wide<T>::Vector{};
    std::memcpy(&vector, from, static_cast<std::size_t>(count) * sizeof(T));
  }
}

template <class T>
HEADWAY_ALWAYS_INLINE double sum_of(const typename Wide<T>::Vector& vector) {
  double sums[4] = {};
  for (int lane = 0; lane < Wide<T>::lanes; ++lane) {
    sums[lane % 4] += static_cast<double>(vector[lane]);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

template <class T>
HEADWAY_ALWAYS_INLINE T largest_of(const typename Wide<T>::Vector& vector) {
  T highest[4] = {vector[0], vector[1], vector[2], vector[3]};
  for (int lane = 4; lane < Wide<T>::lanes; ++lane) {
    highest[lane % 4] = vector[lane] > highest[lane % 4] ? vector[lane] : highest[lane % 4];
  }
  return std::max(std::max(highest[0], highest[1]), std::max(highest[2], highest[3]));
}

// p log p, and 0 for 0: log m = 2 atanh((m - 1) / (m + 1)) for m in [sqrt(1/2), sqrt(2)).
template <class T>
HEADWAY_ALWAYS_INLINE void p_log_p(const typename Wide<T>::Vector& p, typename Wide<T>::Vector& result) {
  using W = Wide<T>;
  typename W::Integers bits;
  std::memcpy(&bits, &p, sizeof bits);
  const typename W::Integers exponent = (bits - W::half_root) >> W::mantissa_bits;
  bits -= exponent << W::mantissa_bits;
  typename W::Vector m;
  std::memcpy(&m, &bits, sizeof m);
  const typename W::Vector s = (m - 1) / (m + 1), s2 = s * s;
  typename W::Vector series = s2 * T(0) + T(1) / T(2 * W::log_terms - 1);
  for (int term = W::log_terms - 2; term >= 0; --term) {
    series = series * s2 + T(1) / T(2 * term + 1);
  }
  constexpr T ln2 = static_cast<T>(0.693147180559945309417232121458L);
  result = p * (__builtin_convertvector(exponent, typename W::Vector) * ln2 + 2 * s * series);
}

// 2^n for whole n from -bias + 1 to bias.
template <class T>
HEADWAY_ALWAYS_INLINE void power_of_two(const typename Wide<T>::Integers& n, typename Wide<T>::Vector& result) {
  const typename Wide<T>::Integers bits = (n + Wide<T>::bias) << Wide<T>::mantissa_bits;
  std::memcpy(&result, &bits, sizeof result);
}

// exp(x) for x up to about 1: x = n log 2 + r, a series in r, and 2^n in two steps, so that small results become
// denormal before they become 0.
template <class T>
HEADWAY_ALWAYS_INLINE void exponential(const typename Wide<T>::Vector& exponent, typename Wide<T>::Vector& result) {
  using W = Wide<T>;
  constexpr T log2e = static_cast<T>(1.442695040888963407359924681001892L), lowest = T(-1.04) * W::bias;
  constexpr T ln2_high = W::lanes == 16 ? static_cast<T>(0x1.62e4p-1) : static_cast<T>(0x1.62e42fee00000p-1);
  constexpr T ln2_low = static_cast<T>(0.693147180559945309417232121458176568L - static_cast<long double>(ln2_high));
  // Below `lowest` everything is 0. NaN stays NaN.
  const typename W::Vector x = exponent < lowest ? typename W::Vector{} + lowest : exponent;
  const typename W::Integers whole = __builtin_convertvector(x * log2e - T(0.5), typename W::Integers);
  const typename W::Vector n = __builtin_convertvector(whole, typename W::Vector);
  const typename W::Vector r = (x - n * ln2_high) - n * ln2_low;
  typename W::Vector series = r * T(0) + T(1);
  for (int term = W::exp_terms; term >= 1; --term) {
    series = series * r * (T(1) / T(term)) + T(1);
  }
  typename W::Vector first, second;
  power_of_two<T>(whole / 2, first);
  power_of_two<T>(whole - whole / 2, second);
  result = series * first * second;
}

template <class T>
HEADWAY_ALWAYS_INLINE double exponentiate_body(T* scores, std::int64_t count, T lse) {
  using W = Wide<T>;
  constexpr T infinity = std::numeric_limits<T>::infinity();
  typename W::Vector sums{};
  for (std::int64_t j = 0; j < count; j += W::lanes) {
    typename W::Vector s, p;
    load<T>(s, scores + j, count - j);
    exponential<T>(s - lse, p);
    p = s == -infinity ? typename W::Vector{} : p;
    std::memcpy(scores + j, &p, static_cast<std::size_t>(std::min<std::int64_t>(count - j, W::lanes)) * sizeof(T));
    if (count - j < W::lanes) {
      load<T>(p, scores + j, count - j);  // lanes behind the row are 0
    }
    sums += p;
  }
  return sum_of<T>(sums);
}

template <class T>
HEADWAY_ALWAYS_INLINE RowSums sum_row_body(const WeightRow<T>& row, std::int64_t position, TopList<T>& top) {
  using W = Wide<T>;
  typename W::Vector lane_numbers;
  for (int lane = 0; lane < W::lanes; ++lane) {
    lane_numbers[lane] = static_cast<T>(lane);
  }
  RowSums sums;
  for (std::int64_t block = row.begin; block < row.end; block += block_keys) {
    const std::int64_t block_end = std::min(block + block_keys, row.end);
    typename W::Vector entropy{}, distance{}, highest{};
    for (std::int64_t j = block; j < block_end; j += W::lanes) {
      typename W::Vector p, plogp;
      load<T>(p, row.p + j, block_end - j);
      p_log_p<T>(p, plogp);
      entropy -= plogp;
      const typename W::Vector ahead = lane_numbers + static_cast<T>(j - position);
      distance += p * (ahead < 0 ? -ahead : ahead);
      highest = p > highest ? p : highest;
    }
    sums.entropy += sum_of<T>(entropy);
    sums.distance += sum_of<T>(distance);
    if (top.size > 0 && largest_of<T>(highest) > top.threshold()) {
      for (std::int64_t j = block; j < block_end; ++j) {
        if (row.p[j] > top.threshold()) {
          top.offer(j, row.p[j]);
        }
      }
    }
  }
  return sums;
}

template <class T>
HEADWAY_ALWAYS_INLINE void add_received_body(const WeightRow<T>& row, double* received) {
  for (std::int64_t j = row.begin; j < row.end; ++j) {
    received[j] += static_cast<double>(row.p[j]);
  }
}

template <class T>
HEADWAY_ALWAYS_INLINE void add_cells_body(const WeightRow<T>& row, std::int64_t cell, double* sums, T* highest) {
  using W = Wide<T>;
  for (std::int64_t c = row.begin / cell; c * cell < row.end; ++c) {
    const std::int64_t end = std::min((c + 1) * cell, row.end);
    typename W::Vector sum{}, high{};
    for (std::int64_t j = std::max(c * cell, row.begin); j < end; j += W::lanes) {
      typename W::Vector p;
      load<T>(p, row.p + j, end - j);
      sum += p;
      high = p > high ? p : high;
    }
    sums[c] += sum_of<T>(sum);
    highest[c] = std::max(highest[c], largest_of<T>(high));
  }
}

// Each loop, compiled for every vector width that a machine may have.
#ifdef __x86_64__
#ifdef __clang__  // uses whole vectors anyway, and does not know the option
#define HEADWAY_WHOLE_VECTORS ""
#else
#define HEADWAY_WHOLE_VECTORS ",prefer-vector-width=512"
#endif
#define HEADWAY_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl" HEADWAY_WHOLE_VECTORS)))
#define HEADWAY_AVX2 __attribute__((target("avx2")))

bool has_avx512() {
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has;
}
bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2");
  return has;
}

#define HEADWAY_FOR_EACH_WIDTH(Result, name, parameters, arguments) \
  template <class T>                                                \
  HEADWAY_AVX512 Result name##_avx512 parameters {                  \
    return name##_body<T> arguments;                                \
  }                                                                 \
  template <class T>                                                \
  HEADWAY_AVX2 Result name##_avx2 parameters {                      \
    return name##_body<T> arguments;                                \
  }                                                                 \
  template <class T>                                                \
  Result name##_any parameters {                                    \
    return has_avx512() ? name##_avx512<T> arguments                \
           : has_avx2() ? name##_avx2<T> arguments                  \
                        : name##_body<T>                            \
                              arguments;                            \
  }
#else
#define HEADWAY_FOR_EACH_WIDTH(Result, name, parameters, arguments) \
  template <class T>                                                \
  Result name##_any parameters {                                    \
    return name##_body<T> arguments;                                \
  }
#endif

HEADWAY_FOR_EACH_WIDTH(RowSums, sum_row, (const WeightRow<T>& row, std::int64_t position, TopList<T>& top),
                       (row, position, top))
HEADWAY_FOR_EACH_WIDTH(double, exponentiate, (T * scores, std::int64_t count, T lse), (scores, count, lse))
HEADWAY_FOR_EACH_WIDTH(void, add_received, (const WeightRow<T>& row, double* received), (row, received))
HEADWAY_FOR_EACH_WIDTH(void, add_cells, (const WeightRow<T>& row, std::int64_t cell, double* sums, T* highest),
                       (row, cell, sums, highest))

}  // namespace

template <class T>
void TopList<T>::offer(std::int64_t key, T weight) {
  std::int64_t at = filled < size ? filled++ : size - 1;
  for (; at > 0 && weights[at - 1] < weight; --at) {
    keys[at] = keys[at - 1];
    weights[at] = weights[at - 1];
  }
  keys[at] = key;
  weights[at] = weight;
}

template <class T>
RowSums sum_row(const WeightRow<T>& row, std::int64_t position, TopList<T>& top) {
  return sum_row_any<T>(row, position, top);
}

template <class T>
double exponentiate(T* scores, std::int64_t count, T lse) {
  return exponentiate_any<T>(scores, count, lse);
}

template <class T>
double sum_between(const WeightRow<T>& row, std::int64_t begin, std::int64_t end) {
  double sum = 0;
  for (std::int64_t j = std::max(begin, row.begin); j < std::min(end, row.end); ++j) {
    sum += static_cast<double>(row.p[j]);
  }
  return sum;
}

template <class T>
void add_received(const WeightRow<T>& row, double* received) {
  add_received_any<T>(row, received);
}

template <class T>
void add_cells(const WeightRow<T>& row, std::int64_t cell, double* sums, T* highest) {
  add_cells_any<T>(row, cell, sums, highest);
}

#define HEADWAY_INSTANTIATE(T)                                                  \
  template struct TopList<T>;                                                   \
  template RowSums sum_row(const WeightRow<T>&, std::int64_t, TopList<T>&);     \
  template double exponentiate(T*, std::int64_t, T);                            \
  template double sum_between(const WeightRow<T>&, std::int64_t, std::int64_t); \
  template void add_received(const WeightRow<T>&, double*);                     \
  template void add_cells(const WeightRow<T>&, std::int64_t, double*, T*);
HEADWAY_INSTANTIATE(float)
HEADWAY_INSTANTIATE(double)

}  // namespace headway
