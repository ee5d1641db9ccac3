// The beginning of a call on every rank: check this rank's arguments, agree with the other ranks, and schedule.
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
  // Validates this rank's arguments as any call's, and places them as [B,H,n,D].
  std::function<Problem(const Call&)> checked;
};

struct AgreedCall {
  Schedule schedule;
  Whole whole;
  ConstTensorView query, key, value;  // this rank's, [B,H,n,D], packed with B = 1
  // If dbias is requested: [B,H,n,keys], or 1 for the axes to sum over; packed: over the longest lengths.
  std::optional<TensorView> dbias;
  bool bias_is_shared = false;  // its gradient is a sum over ranks

  Run run(Transport& transport) const { return {transport, schedule, whole, query, key, value}; }
};

// Throws the same error on every rank if one of them has an error, or if arguments that must agree differ.
AgreedCall agree(const CallRequest& request);

}  // namespace headway::distributed
