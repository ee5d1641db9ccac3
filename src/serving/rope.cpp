// rope and rope_backward: checks, and the loop over rows.
//
// A task is a block of positions: their cosines and sines are computed once, into a table that stays in cache, and
// every head's rows at these positions are rotated with it. Rows are read and written once, which bounds the time for
// more than a few heads; for one head the sines do.
#include "headway/rope.h"

#include <algorithm>
#include <vector>

#include "core/ceil_div.h"
#include "core/out_of_memory.h"
#include "core/overlap.h"
#include "core/parallel.h"
#include "core/text.h"
#include "headway/threads.h"
#include "serving/on_device.h"
#include "serving/rotation.h"

namespace headway {
namespace {

constexpr std::int64_t block_rows = 16;

struct Rotated {
  const char* operation;
  const char* input;  // names for error texts
  const char* output;
  ConstTensorView x, positions;
  TensorView out;
  const RopeConfig& config;
  bool back;
  void* stream;
};

template <class... Parts>
[[noreturn]] void invalid_rotation(const Rotated& call, const Parts&... parts) {
  throw InvalidArgument(text(call.operation, ": ", parts...));
}

void check_types(const Rotated& call) {
  if (!is_float(call.x.dtype())) {
    throw TypeMismatch(
        text(call.operation, ": ", call.input, " has type ", call.x.dtype(), ", expected f32, f64, bf16 or f16"));
  }
  if (call.out.dtype() != call.x.dtype()) {
    throw TypeMismatch(text(call.operation, ": ", call.output, " has type ", call.out.dtype(), ", ", call.input,
                            " has ", call.x.dtype()));
  }
  if (!is_integer(call.positions.dtype())) {
    throw TypeMismatch(
        text(call.operation, ": positions has type ", call.positions.dtype(), ", expected integers (i32 or i64)"));
  }
}

void check_places(const Rotated& call) {
  const Device device = call.x.device(), positions = call.positions.device();
  if (call.out.device() != device) {
    invalid_rotation(call, call.output, " is on ", call.out.device(), ", ", call.input, " is on ", device);
  }
  if (positions != device && positions != Device{}) {
    invalid_rotation(call, "positions is on ", positions, ", ", call.input, " is on ", device);
  }
  for (const ConstTensorView& view : {call.x, call.positions, ConstTensorView(call.out)}) {
    if (reinterpret_cast<std::uintptr_t>(view.data()) % size_of(view.dtype()) != 0) {
      invalid_rotation(call, "expected elements at multiples of their size, found ", view.dtype(), " at ", view.data());
    }
  }
  const bool same = call.out.data() == call.x.data() && call.out.strides() == call.x.strides();
  if (shares_memory_with_itself(call.out)) {
    invalid_rotation(call, call.output, " has elements that share memory");
  }
  if ((!same && share_memory(call.out, call.x)) || share_memory(call.out, call.positions)) {
    invalid_rotation(call, call.output, " overlaps ", same ? "positions" : "an input", " in memory");
  }
}

void check_shapes(const Rotated& call) {
  const Dims& sizes = call.x.sizes();
  const int rank = sizes.size();
  if (rank < 2) {
    invalid_rotation(call, call.input, " has shape ", sizes, ", expected (..., S, D)");
  }
  if (call.out.sizes() != sizes) {
    invalid_rotation(call, call.output, " has shape ", call.out.sizes(), ", ", call.input, " has ", sizes);
  }
  const Dims shared = {sizes[rank - 2]}, each = {sizes[0], sizes[rank - 2]};
  const bool fits = call.positions.sizes() == shared || (rank > 2 && call.positions.sizes() == each);
  if (!fits) {
    invalid_rotation(call, "positions has shape ", call.positions.sizes(), ", expected ", shared,
                     rank > 2 ? text(" or ", each) : "", " for ", call.input, " ", sizes);
  }
}

// Where the rows at one position begin: offsets in elements of x and out over every axis but the positions' own and D.
struct RowOffsets {
  RowOffsets(const ConstTensorView& x, const TensorView& out, int first_axis) : x_(1, 0), out_(1, 0) {
    for (int axis = first_axis; axis < x.rank() - 2; ++axis) {
      repeat(x_, x.size(axis), x.stride(axis));
      repeat(out_, x.size(axis), out.stride(axis));
    }
  }
  std::size_t size() const { return x_.size(); }
  std::int64_t x(std::size_t i) const { return x_[i]; }
  std::int64_t out(std::size_t i) const { return out_[i]; }

 private:
  static void repeat(std::vector<std::int64_t>& offsets, std::int64_t count, std::int64_t stride) {
    std::vector<std::int64_t> result;
    result.reserve(offsets.size() * static_cast<std::size_t>(count));
    for (const std::int64_t offset : offsets) {
      for (std::int64_t i = 0; i < count; ++i) {
        result.push_back(offset + i * stride);
      }
    }
    offsets = std::move(result);
  }

  std::vector<std::int64_t> x_, out_;
};

template <class T>
void rotate_block(const Rotated& call, const RopePairs& pairs, const RowOffsets& offsets, std::int64_t b,
                  std::int64_t begin) {
  using Number = RotationType<T>;
  const int rank = call.x.rank();
  const bool each = call.positions.rank() == 2;
  const std::int64_t rows = std::min(block_rows, call.x.size(-2) - begin), width = call.x.size(-1);
  std::vector<Number> table(static_cast<std::size_t>(rows * pairs.dims()));
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t place = (each ? b * call.positions.stride(0) : 0) + (begin + r) * call.positions.stride(-1);
    const std::int64_t position = load_integer(call.positions, place);
    // 0 - position in unsigned arithmetic, since the smallest signed number has no negative.
    const auto opposite = static_cast<std::int64_t>(0 - static_cast<std::uint64_t>(position));
    pairs.turn(call.back ? opposite : position, table.data() + r * pairs.dims());
  }
  const std::int64_t x_first = each ? b * call.x.stride(0) : 0, out_first = each ? b * call.out.stride(0) : 0;
  const auto* x = static_cast<const T*>(call.x.data()) + x_first + begin * call.x.stride(rank - 2);
  auto* out = static_cast<T*>(call.out.data()) + out_first + begin * call.out.stride(rank - 2);
  const auto rotate = [&](auto stride, auto out_stride) {
    for (std::size_t i = 0; i < offsets.size(); ++i) {
      for (std::int64_t r = 0; r < rows; ++r) {
        rotate_row(pairs, table.data() + r * pairs.dims(), width, x + offsets.x(i) + r * call.x.stride(rank - 2),
                   stride, out + offsets.out(i) + r * call.out.stride(rank - 2), out_stride);
      }
    }
  };
  constexpr std::integral_constant<std::int64_t, 1> adjacent;
  if (call.x.stride(-1) == 1 && call.out.stride(-1) == 1) {
    rotate(adjacent, adjacent);
  } else {
    rotate(call.x.stride(-1), call.out.stride(-1));
  }
}

void run(const Rotated& call) {
  check_types(call);
  check_shapes(call);
  check_places(call);
  const RopePairs pairs(call.operation, call.x.size(-1), call.config);
  const std::int64_t elements = call.x.elements();
  if (elements == 0) {
    return;
  }
  if (call.x.device() != Device{}) {
    const DeviceRotation rotation{pairs.frequencies(), pairs.interleaved(), call.back};
    return rope_on_device(call.operation, call.x, call.positions, call.out, rotation, call.stream);
  }
  const bool each = call.positions.rank() == 2;
  const RowOffsets offsets(call.x, call.out, each ? 1 : 0);
  const std::int64_t blocks = ceil_div(call.x.size(-2), block_rows), batch = each ? call.x.size(0) : 1;
  with_float_type(call.x.dtype(), [&](auto type) {
    parallel_for(batch * blocks, elements < parallel_elements ? 1 : get_threads(), [&](std::int64_t task, int) {
      rotate_block<decltype(type)>(call, pairs, offsets, task / blocks, task % blocks * block_rows);
    });
  });
}

}  // namespace

void rope(ConstTensorView x, ConstTensorView positions, TensorView out, const RopeConfig& config, void* stream) try {
  run({.operation = "rope",
       .input = "x",
       .output = "out",
       .x = x,
       .positions = positions,
       .out = out,
       .config = config,
       .back = false,
       .stream = stream});
} catch (...) {
  throw_own_error("rope");
}

Tensor rope(ConstTensorView x, ConstTensorView positions, const RopeConfig& config, void* stream) try {
  Tensor out = Tensor::uninitialized(x.sizes(), x.dtype(), x.device(), stream);
  rope(x, positions, out, config, stream);
  return out;
} catch (...) {
  throw_own_error("rope");
}

void rope_backward(ConstTensorView grad_out, ConstTensorView positions, TensorView dx, const RopeConfig& config,
                   void* stream) try {
  run({.operation = "rope_backward",
       .input = "grad_out",
       .output = "dx",
       .x = grad_out,
       .positions = positions,
       .out = dx,
       .config = config,
       .back = true,
       .stream = stream});
} catch (...) {
  throw_own_error("rope_backward");
}

Tensor rope_backward(ConstTensorView grad_out, ConstTensorView positions, const RopeConfig& config, void* stream) try {
  Tensor dx = Tensor::uninitialized(grad_out.sizes(), grad_out.dtype(), grad_out.device(), stream);
  rope_backward(grad_out, positions, dx, config, stream);
  return dx;
} catch (...) {
  throw_own_error("rope_backward");
}

}  // namespace headway
