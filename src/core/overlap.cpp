// Sharing memory is a bounded linear equation: base_a + sum s_k x_k == base_b + sum t_k y_k for some indices in range.
// Moving everything to one side gives sum c_k z_k = target with c_k > 0 and 0 <= z_k <= u_k, which a depth-first search
// with bounds and greatest common divisors answers at once for the layouts that occur.
#include "core/overlap.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace headway {
namespace {

__extension__ typedef __int128 Wide;  // offsets of any two views in one address space, with room to add

struct Term {
  Wide coefficient;  // > 0, in bytes
  Wide limit;        // z from 0 to limit
};

class Equation {
 public:
  // Adds coefficient * z for z in [0, limit]; a negative coefficient counts z from its other end.
  void add(Wide coefficient, Wide limit) {
    if (coefficient < 0) {
      target_ -= coefficient * limit;
      coefficient = -coefficient;
    }
    if (coefficient > 0 && limit > 0) {
      terms_.push_back({coefficient, limit});
    }
  }
  void add_constant(Wide constant) { target_ -= constant; }

  bool has_solution() {
    merge_terms();
    suffix_reach_.assign(terms_.size() + 1, 0);
    suffix_divisor_.assign(terms_.size() + 1, 0);
    for (std::size_t k = terms_.size(); k-- > 0;) {
      suffix_reach_[k] = suffix_reach_[k + 1] + terms_[k].coefficient * terms_[k].limit;
      suffix_divisor_[k] = divisor(terms_[k].coefficient, suffix_divisor_[k + 1]);
    }
    return search(0, target_);
  }

 private:
  // A layout that is still undecided after this many steps counts as sharing: refusing is safe, guessing is not.
  static constexpr int step_limit = 1'000'000;

  static Wide divisor(Wide a, Wide b) {
    while (b != 0) {
      a = std::exchange(b, a % b);
    }
    return a;
  }

  // Largest coefficient first; an axis that just continues the one inside it joins it (a contiguous block is one term).
  void merge_terms() {
    std::sort(terms_.begin(), terms_.end(), [](const Term& a, const Term& b) { return a.coefficient < b.coefficient; });
    std::vector<Term> merged;
    for (const Term& term : terms_) {
      if (!merged.empty() && term.coefficient % merged.back().coefficient == 0 &&
          term.coefficient / merged.back().coefficient <= merged.back().limit + 1) {
        merged.back().limit += term.coefficient / merged.back().coefficient * term.limit;
      } else {
        merged.push_back(term);
      }
    }
    std::reverse(merged.begin(), merged.end());
    terms_ = std::move(merged);
  }

  bool search(std::size_t k, Wide rest) {
    if (++steps_ > step_limit) {
      return true;
    }
    if (rest < 0 || rest > suffix_reach_[k]) {
      return false;
    }
    if (k == terms_.size()) {
      return rest == 0;
    }
    if (rest % suffix_divisor_[k] != 0) {
      return false;
    }
    const auto [coefficient, limit] = terms_[k];
    const Wide unreachable = rest - suffix_reach_[k + 1];  // what the later terms cannot supply
    const Wide lowest = unreachable > 0 ? (unreachable + coefficient - 1) / coefficient : 0;
    for (Wide z = std::min(limit, rest / coefficient); z >= lowest; --z) {
      if (search(k + 1, rest - coefficient * z)) {
        return true;
      }
    }
    return false;
  }

  std::vector<Term> terms_;
  std::vector<Wide> suffix_reach_, suffix_divisor_;
  Wide target_ = 0;
  int steps_ = 0;
};

Wide address(ConstTensorView view) { return static_cast<Wide>(reinterpret_cast<std::uintptr_t>(view.data())); }

// The bytes of the view's elements, added with a sign.
void add_bytes(Equation& equation, ConstTensorView view, int sign) {
  const auto element = static_cast<Wide>(size_of(view.dtype()));
  equation.add(sign, element - 1);
  for (int axis = 0; axis < view.rank(); ++axis) {
    equation.add(sign * element * view.stride(axis), view.size(axis) - 1);
  }
  equation.add_constant(sign * address(view));
}

// The bytes from a view's lowest to past its highest element.
struct Extent {
  Wide begin, end;

  explicit Extent(ConstTensorView view) : begin(address(view)), end(begin + static_cast<Wide>(size_of(view.dtype()))) {
    for (int axis = 0; axis < view.rank(); ++axis) {
      const Wide reach = static_cast<Wide>(size_of(view.dtype())) * view.stride(axis) * (view.size(axis) - 1);
      (reach < 0 ? begin : end) += reach;
    }
  }
};

}  // namespace

bool share_memory(ConstTensorView a, ConstTensorView b) {
  if (a.elements() == 0 || b.elements() == 0 || a.device() != b.device()) {
    return false;
  }
  const Extent extent_a(a);
  const Extent extent_b(b);
  if (extent_a.end <= extent_b.begin || extent_b.end <= extent_a.begin) {
    return false;
  }
  Equation equation;
  add_bytes(equation, a, 1);
  add_bytes(equation, b, -1);
  return equation.has_solution();
}

bool shares_memory_with_itself(ConstTensorView view) {
  if (view.elements() == 0 || view.is_contiguous()) {
    return false;
  }
  // Two different indices differ first somewhere: at `first` by 1 + z with z >= 0, at later axes by any amount.
  for (int first = 0; first < view.rank(); ++first) {
    if (view.size(first) < 2) {
      continue;
    }
    Equation equation;
    equation.add(view.stride(first), view.size(first) - 2);
    equation.add_constant(view.stride(first));
    for (int axis = first + 1; axis < view.rank(); ++axis) {
      equation.add(view.stride(axis), 2 * (static_cast<Wide>(view.size(axis)) - 1));
      equation.add_constant(-static_cast<Wide>(view.stride(axis)) * (view.size(axis) - 1));
    }
    if (equation.has_solution()) {
      return true;
    }
  }
  return false;
}

}  // namespace headway
