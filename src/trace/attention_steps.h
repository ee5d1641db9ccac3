// The steps between the heads' queries, keys and values and their outputs.
#pragma once

#include <cstddef>

#include "core/problem.h"
#include "trace/builder.h"

namespace headway::tracing {

// `query` [B,H,Sq,D], `key` [B,Hkv,Sk,D] and `value` [B,Hkv,Sk,Dv] are steps of the trace already. Returns the index of
// the output's step. The problem gives sizes and options.
std::size_t add_attention(Builder& builder, const Problem& problem, std::size_t query, std::size_t key,
                          std::size_t value);

}  // namespace headway::tracing
