// A structured mask for the sizes of one call.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "masks/node.h"

namespace headway {

// A pair is allowed if the spans and the bools allow it; an absent part allows all pairs.
struct ResolvedMask {
  std::optional<Tensor> spans;           // [B|1, H|1, entries, R, 2], packed [1, H|1, total_q, R, 2]
  std::int64_t rows = 1;                 // queries of an entry
  std::optional<ConstTensorView> bools;  // [B|1, H|1, Sq|1, Sk|1], packed of the longest sequences
  Tensor own_bools;                      // their memory, unless a dense mask has it
};

// Errors start with the operation. The mask caches the last result.
std::shared_ptr<const ResolvedMask> resolve_mask(std::string_view operation, const Mask& mask, MaskSizes sizes);

// For packed sequences: spans count inside the sequence of their row. The bounds are checked ones in host memory.
std::shared_ptr<const ResolvedMask> resolve_packed_mask(std::string_view operation, const Mask& mask,
                                                        ConstTensorView cu_seqlens_q, ConstTensorView cu_seqlens_k);

// The mask as bools [B|1, H|1, Sq, Sk].
Tensor bools_of(const MaskNode& node, MaskSizes sizes);

}  // namespace headway
