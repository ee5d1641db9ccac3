// Shapes of results. They are computed before the call is checked, so they must stand any rank: what does not fit then
// gets an empty result, and the check, which looks at the inputs first, refuses the inputs.
#pragma once

#include "errors.h"

namespace headway::python {

inline Dims with_last(Dims sizes, std::int64_t last) {
  if (sizes.empty()) {
    return {0};
  }
  sizes[sizes.size() - 1] = last;
  return sizes;
}

inline std::int64_t from_end(const Dims& sizes, int back) {
  return sizes.size() < back ? 0 : sizes[sizes.size() - back];
}

// [.., Sq, Dv]
inline Dims out_sizes(const Dims& query, const Dims& value) { return with_last(query, from_end(value, 1)); }

// [.., Sq, Sk]
inline Dims matrix_sizes(const Dims& query, const Dims& key) { return with_last(query, from_end(key, 2)); }

// [.., Sq], packed [H, total]
inline Dims lse_sizes(const Dims& query, bool packed) {
  if (packed) {
    return query.size() == 3 ? Dims{query[1], query[0]} : Dims{0};
  }
  return query.empty() ? Dims{0} : Dims(std::span(query.begin(), query.end() - 1));
}

inline DType statistics_type(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

}  // namespace headway::python
