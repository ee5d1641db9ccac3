// Section 3's bounds.
#include <algorithm>
#include <cmath>

#include "support/oracle.h"
#include "support/units.h"

namespace headway::test {

Array error_bound(const Bounded& exact, Kind kind, DType dtype, const Array* eager) {
  const bool half = dtype == DType::bf16 || dtype == DType::f16;
  const Real unit = unit_of(dtype), quantum = quantum_of(dtype);
  const Real type_unit = kind == Kind::lse ? 0 : half_unit_of(dtype);
  // (units + slope * L) * unit
  const Real units = kind == Kind::weights || (kind == Kind::lse && !half) ? 32 : 64;
  // Gradients begin with an lse that may be off by (4 L + 2 |lse|) units itself.
  const Real slope = kind == Kind::out || (kind == Kind::lse && !half) ? 4 : 8;
  Real eager_error = 0;  // the largest, in units of the element's terms; an eager result that overflowed says nothing
  for (std::size_t n = 0; eager && n < exact.terms.values.size(); ++n)
    if (exact.terms.values[n] > 0 && std::isfinite(eager->values[n]))
      eager_error = std::max(eager_error, std::abs(eager->values[n] - exact.value.values[n]) / exact.terms.values[n]);
  Array bound(exact.value.sizes());
  for (std::size_t n = 0; n < bound.values.size(); ++n) {
    const Real terms = exact.terms.values[n], weighted = exact.weighted.values[n];
    if (terms == 0 && weighted == 0 && kind != Kind::lse) continue;  // nothing to round
    if (kind == Kind::lse) {
      bound.values[n] = std::isinf(exact.value.values[n]) ? 0 : unit * (units + slope * weighted + 2 * terms);
      continue;
    }
    // Whatever the scores are, no weight is above 1: for huge scores that says more than the bound.
    const Real most = 1.05L * exact.limit.values[n] + std::abs(exact.value.values[n]);
    const Real contract = unit * (units * terms + slope * weighted) + 2 * (type_unit + eager_error) * terms;
    bound.values[n] = std::min(contract, most) + 4 * quantum;
  }
  return bound;
}

}  // namespace headway::test
