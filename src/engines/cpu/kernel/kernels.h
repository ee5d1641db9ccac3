// The kernels of one instruction set as a table of functions. An isa/ file includes its vocabulary, then this.
#pragma once

#include "engines/cpu/kernel/forward.h"
#include "engines/cpu/kernel/scores.h"
#include "engines/cpu/kernels.h"

namespace headway::cpu {
namespace {

template <class S, class In>
void run_forward(const ForwardArgs& args, void* scratch) {
  Forward<S, In>(args, scratch).run();
}

template <class S, class In>
void run_scores(const ForwardArgs& args, void* scratch) {
  Scores<S, In>(args, scratch).run();
}

template <class S, class In>
std::int64_t forward_scratch(const ForwardArgs& args, std::int64_t panels) {
  return Forward<S, In>::scratch_bytes(args, panels);
}

template <class S, class In>
constexpr ForwardKernel forward_kernel() {
  return {run_forward<S, In>, run_scores<S, In>, forward_scratch<S, In>, Forward<S, In>::width};
}

// In the order of Storage: f32, f64, bf16, f16.
constexpr Kernels make_kernels(const char* name) {
  return {name,
          {forward_kernel<F32, float>(), forward_kernel<F64, double>(), forward_kernel<F32, bfloat16>(),
           forward_kernel<F32, float16>()}};
}

}  // namespace
}  // namespace headway::cpu
