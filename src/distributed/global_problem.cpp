#include "distributed/global_problem.h"

#include "core/elements.h"
#include "core/validate.h"

namespace headway::distributed {

ConstTensorView shape_only(DType dtype, const Dims& sizes) {
  static const double element = 0;
  Dims strides = sizes;
  for (int axis = 0; axis < strides.size(); ++axis) {
    strides[axis] = 0;
  }
  return {&element, dtype, sizes, strides};
}

Problem global_problem(std::string_view operation, const Sizes& sizes, const AttentionOptions& options,
                       const std::optional<Packing>& packing, Pass pass) {
  const auto rows = [&](std::int64_t heads, std::int64_t length, std::int64_t width) {
    return shape_only(sizes.dtype, packing ? Dims{length, heads, width} : Dims{sizes.batch, heads, length, width});
  };
  Call call = {.operation = operation,
               .query = rows(sizes.heads, sizes.queries, sizes.head_dim),
               .key = rows(sizes.kv_heads, sizes.keys, sizes.head_dim),
               .value = rows(sizes.kv_heads, sizes.keys, sizes.value_dim),
               .options = options};
  if (packing) {
    call.cu_seqlens_q = packing->cu_seqlens_q;
    call.cu_seqlens_k = packing->cu_seqlens_k;
  }
  return inputs_problem(call, pass);
}

std::int64_t valid_length(const Problem& problem, std::int64_t b, std::int64_t i) {
  const ConstTensorView& lens = *problem.valid_lens;
  return load_integer(lens, b * lens.stride(0) + i * lens.stride(1));
}

}  // namespace headway::distributed
