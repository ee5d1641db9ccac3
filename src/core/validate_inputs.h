// The first half of validation: inputs and options.
#pragma once

#include "core/checks.h"
#include "core/validate.h"

namespace headway {

// Checks the call's inputs and options and fills in all of the problem but its outputs.
Layout resolve(Problem& problem, const Call& call, Pass pass);

// The part of it that places keys and values in pages (validate_paged.cpp).
Layout place_paged(Problem& problem, const Call& call);

// ---- What both have in common ----

// The longest axis allowed, so that sums of a few lengths fit in 64 bits, even where another axis is 0 and nothing is
// stored.
inline constexpr std::int64_t longest_axis = std::int64_t{1} << 60;

// The checked number of packed sequences, and the length of the longest.
struct Packing {
  std::int64_t sequences = 0;
  std::int64_t longest = 0;
};

// Lengths may be in host memory whatever the device; those on the device are not read here.
inline bool on_host(ConstTensorView lens) { return lens.device() == Device{}; }
void check_integers(const Problem& problem, const char* name, ConstTensorView lens);
Packing check_cu_seqlens(const Problem& problem, const char* name, ConstTensorView lens, std::int64_t total);

// That the problem's query, key and value have sizes that can be counted, and its heads divide.
void check_axes(const Problem& problem);
void check_heads(const Problem& problem);

}  // namespace headway
