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

Problem global_problem(const GlobalCall& whole) {
  const Sizes& sizes = whole.sizes;
  const std::optional<Packing>& packing = whole.packing;
  const auto rows = [&](std::int64_t heads, std::int64_t length, std::int64_t width) {
    const Dims shape = packing           ? Dims{length, heads, width}
                       : whole.rank == 2 ? Dims{length, width}
                       : whole.rank == 3 ? Dims{sizes.batch, length, width}
                                         : Dims{sizes.batch, heads, length, width};
    return shape_only(sizes.dtype, shape);
  };
  Call call = {.operation = whole.operation,
               .query = rows(sizes.heads, sizes.queries, sizes.head_dim),
               .key = rows(sizes.kv_heads, sizes.keys, sizes.head_dim),
               .value = rows(sizes.kv_heads, sizes.keys, sizes.value_dim),
               .options = whole.options};
  if (packing) {
    call.cu_seqlens_q = packing->cu_seqlens_q;
    call.cu_seqlens_k = packing->cu_seqlens_k;
  }
  return inputs_problem(call, whole.pass);
}

std::int64_t valid_length(const Problem& problem, std::int64_t b, std::int64_t i) {
  const ConstTensorView& lens = *problem.valid_lens;
  return load_integer(lens, b * lens.stride(0) + i * lens.stride(1));
}

}  // namespace headway::distributed
