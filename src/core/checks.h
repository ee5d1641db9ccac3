// The pieces of validation: errors that start with the operation, single checks, and how a user's axes map to
// [B,H,S,D]. Private to validate*.cpp.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "core/text.h"

namespace headway {

template <class... Parts>
[[noreturn]] void invalid(const Problem& problem, const Parts&... parts) {
  throw InvalidArgument(text(problem.operation, ": ", parts...));
}

template <class... Parts>
[[noreturn]] void mismatch(const Problem& problem, const Parts&... parts) {
  throw TypeMismatch(text(problem.operation, ": ", parts...));
}

// An enum may be cast from any number; a value without a name would otherwise compute something unspecified.
template <class Enum>
void require_enumerator(const Problem& problem, const char* name, Enum value, Enum last) {
  if (value > last) {
    invalid(problem, name, " is ", static_cast<int>(value), ", expected 0 to ", static_cast<int>(last));
  }
}

// How the user's views map to [B,H,S,...]: rank 4 as it is; rank 3 lacks the heads, rank 2 the batch too; packed is
// [total,H,D].
struct Layout {
  int rank = 4;
  bool packed = false;
  std::int64_t batch = 0;

  // query, key, value, out and their gradients
  template <class View>
  View rows(const View& view) const {
    if (packed) {
      const View by_head = view.transpose(0, 1).unsqueeze(0);
      return by_head.expand({batch, by_head.size(1), by_head.size(2), by_head.size(3)});
    }
    return with_leading_axes(view);
  }

  // lse: [B,H,Sq] without the same axes; packed [H,total]
  template <class View>
  View row_values(const View& view) const {
    if (packed) {
      return view.unsqueeze(0).expand({batch, view.size(0), view.size(1)});
    }
    return with_leading_axes(view);
  }

  // mask, bias, weights, scores: [B,H,Sq,Sk] without the same axes
  template <class View>
  View matrix(const View& view) const {
    return packed ? view : with_leading_axes(view);
  }

  Dims matrix_sizes(const Problem& problem) const {
    if (packed || rank == 4) {
      return {problem.batch, problem.heads, problem.query_len, problem.key_len};
    }
    return rank == 3 ? Dims{problem.batch, problem.query_len, problem.key_len}
                     : Dims{problem.query_len, problem.key_len};
  }

 private:
  template <class View>
  View with_leading_axes(const View& view) const {
    if (rank == 4) {
      return view;
    }
    return rank == 3 ? view.unsqueeze(1) : view.unsqueeze(0).unsqueeze(0);
  }
};

inline void check_device(const Problem& problem, const char* name, ConstTensorView view) {
  if (view.device() != problem.query.device()) {
    invalid(problem, name, " is on ", view.device(), ", query is on ", problem.query.device());
  }
}

inline void check_alignment(const Problem& problem, const char* name, ConstTensorView view) {
  if (reinterpret_cast<std::uintptr_t>(view.data()) % size_of(view.dtype()) != 0) {
    invalid(problem, name, " must be aligned to its element's ", size_of(view.dtype()), " bytes, found address ",
            view.data());
  }
}

inline void check_storage(const Problem& problem, const char* name, ConstTensorView view) {
  check_device(problem, name, view);
  check_alignment(problem, name, view);
}

inline void check_same_type(const Problem& problem, const char* name, ConstTensorView view) {
  if (view.dtype() != problem.dtype()) {
    mismatch(problem, name, " has type ", view.dtype(), ", query has ", problem.dtype());
  }
}

inline void check_float(const Problem& problem, const char* name, ConstTensorView view) {
  if (!is_float(view.dtype())) {
    mismatch(problem, name, " has type ", view.dtype(), ", expected f32, f64, bf16 or f16");
  }
}

inline void check_sizes(const Problem& problem, const char* name, ConstTensorView view, const Dims& expected) {
  if (view.sizes() != expected) {
    invalid(problem, name, " has shape ", view.sizes(), ", expected ", expected);
  }
}

inline void check_lse_type(const Problem& problem, ConstTensorView lse) {
  const DType expected = problem.dtype() == DType::f64 ? DType::f64 : DType::f32;
  if (lse.dtype() != expected) {
    mismatch(problem, "lse has type ", lse.dtype(), ", expected ", expected, " for ", problem.dtype(), " inputs");
  }
}

inline void check_lse(const Problem& problem, ConstTensorView lse, const Dims& sizes) {
  check_lse_type(problem, lse);
  check_storage(problem, "lse", lse);
  check_sizes(problem, "lse", lse, sizes);
}

inline ConstTensorView per_head(const Problem& problem, const char* name, ConstTensorView view) {
  check_float(problem, name, view);
  check_storage(problem, name, view);
  const ConstTensorView vector = view.rank() == 0 && problem.heads == 1 ? view.unsqueeze(0) : view;
  check_sizes(problem, name, vector, {problem.heads});
  return vector;
}

}  // namespace headway
