// The kernels of one instruction set as a table of functions. An isa/ file includes its vocabulary, then this. Those of
// f64 share no code with the others and are compiled beside them, in a file of their own.
#pragma once

#include "engines/cpu/gemm/gemm.h"
#include "engines/cpu/kernel/backward.h"
#include "engines/cpu/kernel/backward_bias.h"
#include "engines/cpu/kernel/backward_dq.h"
#include "engines/cpu/kernel/backward_key_parts.h"
#include "engines/cpu/kernel/backward_prepare.h"
#include "engines/cpu/kernel/backward_short.h"
#include "engines/cpu/kernel/decode.h"
#include "engines/cpu/kernel/decode_finish.h"
#include "engines/cpu/kernel/forward.h"
#include "engines/cpu/kernel/forward_short.h"
#include "engines/cpu/kernel/scores.h"
#include "engines/cpu/kernels.h"
#include "engines/cpu/simd/vocabulary.h"

namespace headway::cpu {
namespace {

template <class S, class In>
void run_forward(const ForwardArgs& args, void* scratch) {
  if (ShortForward<S, In>::suits(args)) {
    ShortForward<S, In>(args, scratch).run();
  } else {
    Forward<S, In>(args, scratch).run();
  }
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
  return {run_forward<S, In>,
          run_scores<S, In>,
          forward_scratch<S, In>,
          ForwardSizes<S>::width,
          ForwardSizes<S>::most_panels,
          ForwardSizes<S>::key_block,
          short_keys};
}

template <class S, class In>
void run_decode(const DecodeArgs& args, std::int64_t chunk, void* scratch) {
  Decode<S, In>(args, scratch).run(chunk);
}

template <class S, class In>
void finish_decode(const DecodeArgs& args) {
  DecodeFinish<S, In>(args).run();
}

template <class S, class In>
void run_decode_weights(const DecodeArgs& args, std::int64_t chunk, void* scratch) {
  Decode<S, In>(args, scratch).run_weights(chunk);
}

template <class S, class In>
std::int64_t decode_scratch(const DecodeArgs& args) {
  return Decode<S, In>::scratch_bytes(args);
}

template <class S>
std::int64_t decode_partials(const DecodeArgs& args) {
  return PartialSoftmaxes<S>(args).bytes;
}

// A panel fills lanes with queries; by measurement it is faster once about half of a vector's lanes have one.
template <class S, class In>
constexpr DecodeKernel decode_kernel() {
  return {run_decode<S, In>,     finish_decode<S, In>, run_decode_weights<S, In>,
          decode_scratch<S, In>, decode_partials<S>,   S::lanes > 4 ? S::lanes / 2 : 2};
}

// 8-bit rows with queries of type In; without weights, since calls over pages return none.
template <class Row, class In>
constexpr DecodeKernel scaled_decode_kernel() {
  DecodeKernel kernel = decode_kernel<F32, In>();
  kernel.run = run_decode<F32, Row>;
  kernel.run_weights = nullptr;
  kernel.scratch_bytes = decode_scratch<F32, Row>;
  return kernel;
}

template <class S, class In>
std::int64_t prepare_scratch(const BackwardArgs& args) {
  return LargeRows<S, In>::scratch_size(args) * static_cast<std::int64_t>(sizeof(typename S::Scalar));
}

template <class S, class In>
void run_gradients(const BackwardArgs& args, int chunk, void* scratch) {
  if (ShortBackward<S, In>::suits(args)) {
    ShortBackward<S, In>(args, static_cast<typename S::Scalar*>(scratch)).run();
  } else {
    Backward<FloatBlocks<S, In>>(args, chunk, static_cast<typename S::Scalar*>(scratch)).run();
  }
}

template <class S, class In>
std::int64_t gradients_scratch(const BackwardArgs& args) {
  const std::int64_t scalars = ShortBackward<S, In>::suits(args) ? ShortBackward<S, In>::scratch_size(args)
                                                                 : Backward<FloatBlocks<S, In>>::scratch_size(args);
  return scalars * static_cast<std::int64_t>(sizeof(typename S::Scalar));
}

template <class S, class In>
void run_bias(const BiasRegion& region, void* scratch) {
  BiasBackward<S, In>(region, static_cast<typename S::Scalar*>(scratch)).run();
}

template <class S, class In>
std::int64_t bias_scratch(const BiasRegion& region) {
  return BiasBackward<S, In>::scratch_size(region) * static_cast<std::int64_t>(sizeof(typename S::Scalar));
}

template <class S, class In>
constexpr BackwardKernel backward_kernel() {
  return {ShortBackward<S, In>::suits,
          chunk_count<S>,
          key_chunks<S>,
          prepare_rows<S, In>,
          prepare_scratch<S, In>,
          run_gradients<S, In>,
          gradients_scratch<S, In>,
          sum_query_gradients<S, In>,
          sum_key_gradients<S, In>,
          run_bias<S, In>,
          bias_scratch<S, In>,
          BiasBackward<S, In>::region_rows,
          BiasBackward<S, In>::region_keys,
          S::lanes,
          sizeof(typename S::Scalar)};
}

template <class S, class In>
void run_gemm(const GemmArgs& args, void* scratch) {
  Gemm<S, In>(args, args.row_begin, args.row_end, scratch).run();
}

template <class S, class In>
constexpr GemmKernel gemm_kernel() {
  return {run_gemm<S, In>, Gemm<S, In>::scratch_bytes, Gemm<S, In>::find_zero_rows, nullptr, Gemm<S, In>::width};
}

static_assert(FloatVocabulary<F32> && DoubleVocabulary<F64>);

constexpr DoubleKernels make_double_kernels() {
  return {forward_kernel<F64, double>(), decode_kernel<F64, double>(), backward_kernel<F64, double>(),
          gemm_kernel<F64, double>()};
}

// In the order of Storage: f32, f64, bf16, f16.
constexpr Kernels make_kernels(const char* name, const DoubleKernels& f64) {
  return {
      name,
      {forward_kernel<F32, float>(), f64.forward, forward_kernel<F32, bfloat16>(), forward_kernel<F32, float16>()},
      {decode_kernel<F32, float>(), f64.decode, decode_kernel<F32, bfloat16>(), decode_kernel<F32, float16>()},
      {backward_kernel<F32, float>(), f64.backward, backward_kernel<F32, bfloat16>(), backward_kernel<F32, float16>()},
      {gemm_kernel<F32, float>(), f64.gemm, gemm_kernel<F32, bfloat16>(), gemm_kernel<F32, float16>()},
      {forward_kernel<F32, float>(), {}, forward_kernel<F32, bfloat16>(), forward_kernel<F32, float16>()},
      {{scaled_decode_kernel<int8, float>(),
        {},
        scaled_decode_kernel<int8, bfloat16>(),
        scaled_decode_kernel<int8, float16>()},
       {scaled_decode_kernel<float8, float>(),
        {},
        scaled_decode_kernel<float8, bfloat16>(),
        scaled_decode_kernel<float8, float16>()}}};
}

}  // namespace
}  // namespace headway::cpu
