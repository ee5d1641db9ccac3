// How a call begins on every rank: check what this rank brings, agree with the others, and schedule.
#pragma once

#include <functional>
#include <optional>

#include "core/validate.h"
#include "distributed/run.h"

namespace headway::distributed {

struct CallRequest {
  const char* operation;
  ConstTensorView query, key, value;  // this rank's, as the user gave them
  Transport& transport;
  const Options& options;
  bool backward = false;
  AttentionGradients gradients = {};
  // Checks what this rank brings by the library's own rules, and places it as [B,H,n,D].
  std::function<Problem(const Call&)> checked;
};

struct AgreedCall {
  Schedule schedule;
  Whole whole;
  ConstTensorView query, key, value;  // this rank's, [B,H,n,D], packed with B = 1
  // Where dbias is asked for: [B,H,n,keys] or 1 for the axes to sum over, packed over the longest lengths.
  std::optional<TensorView> dbias;
  bool bias_is_shared = false;  // its gradient is a sum over ranks

  Run run(Transport& transport) const { return {transport, schedule, whole, query, key, value}; }
};

// Throws the same error on every rank where one of them has one, and where arguments differ that must not.
AgreedCall agree(const CallRequest& request);

}  // namespace headway::distributed
