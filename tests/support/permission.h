// Which keys a row may see; values that all keys of a row share are computed once.
#pragma once

#include <limits>

#include "support/oracle.h"

namespace headway::test {

// What causal, window and ALiBi add to a row's number.
std::int64_t offset(const Spec& spec, std::int64_t b);

class RowPermission {
 public:
  RowPermission(const Spec& spec, std::int64_t b, std::int64_t h, std::int64_t i);

  bool allows(std::int64_t j) const {
    if (j < begin_ || j >= end_) return false;
    if (spans_ != nullptr && !is_in_a_span(j)) return false;
    if (mask_ != nullptr && mask_[j * mask_step_] == 0) return false;
    return bias_ == nullptr || bias_[j * bias_step_] != -std::numeric_limits<Real>::infinity();
  }
  bool is_padding() const { return is_padding_; }
  Real bias(std::int64_t j) const { return bias_ == nullptr ? 0 : bias_[j * bias_step_]; }

 private:
  bool is_in_a_span(std::int64_t j) const;

  bool is_padding_ = false;
  std::int64_t begin_ = 0, end_ = 0;  // outside of it nothing is allowed
  const Real *mask_ = nullptr, *bias_ = nullptr, *spans_ = nullptr;
  std::int64_t mask_step_ = 0, bias_step_ = 0, span_count_ = 0;
};

}  // namespace headway::test
