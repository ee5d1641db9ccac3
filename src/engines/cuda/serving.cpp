// RoPE and a cache's appends, queued on the caller's stream.
#include <bit>
#include <vector>

#include "engines/cuda/device.h"
#include "engines/cuda/kernels/serving_kernels.h"
#include "engines/cuda/upload.h"
#include "serving/on_device.h"

namespace headway {
namespace {

using namespace cuda;

// The table of cosines and sines for some positions, and what it takes of a workspace.
struct Turns {
  const char* operation;
  const DeviceRotation& rotation;
  std::int64_t batch, rows;
  bool in_f64;

  std::int64_t pairs() const { return static_cast<std::int64_t>(rotation.frequencies.frequencies.size()); }
  std::size_t frequency_bytes() const {
    return Workspace::rounded(rotation.frequencies.frequencies.size() * sizeof(double));
  }
  std::size_t table_bytes() const {
    return static_cast<std::size_t>(batch * rows * 2 * pairs()) * (in_f64 ? sizeof(double) : sizeof(float));
  }
  std::size_t bytes() const { return frequency_bytes() + Workspace::rounded(table_bytes()); }

  // Null without pairs.
  void* place(const Lengths& positions, Workspace& workspace, cudaStream_t stream) const {
    if (pairs() == 0) {
      return nullptr;
    }
    std::vector<std::int64_t> words;
    for (const double frequency : rotation.frequencies.frequencies) {
      words.push_back(std::bit_cast<std::int64_t>(frequency));
    }
    auto* frequencies = workspace.take_as<std::int64_t>(words.size());
    check(upload(words.data(), words.size(), frequencies, stream), operation, "sending the frequencies");
    TurnArguments arguments{};
    arguments.frequencies = reinterpret_cast<const double*>(frequencies);
    arguments.positions = positions;
    arguments.rows = rows;
    arguments.batch = batch;
    arguments.pairs = pairs();
    arguments.factor = rotation.frequencies.attention_factor;
    arguments.back = rotation.back;
    arguments.in_f64 = in_f64;
    arguments.table = workspace.take(table_bytes());
    check(launch_turns(arguments, stream), operation, "launching the cosines and sines");
    return arguments.table;
  }
};

// Positions [S] or [B,S] that lie in host memory travel with the call.
bool travel(const ConstTensorView& positions) { return positions.device() == Device{}; }

std::size_t words_bytes(std::size_t count) { return Workspace::rounded(count * sizeof(std::int64_t)); }

const std::int64_t* sent(const std::vector<std::int64_t>& words, const char* operation, const char* what,
                         Workspace& workspace, cudaStream_t stream) {
  auto* target = workspace.take_as<std::int64_t>(words.size());
  check(upload(words.data(), words.size(), target, stream), operation, what);
  return target;
}

Lengths placed(const ConstTensorView& positions, const char* operation, Workspace& workspace, cudaStream_t stream) {
  const bool each = positions.rank() == 2;
  if (!travel(positions)) {
    return {positions.data(), each ? positions.stride(0) : 0, positions.stride(-1), positions.dtype() == DType::i64};
  }
  const Tensor words = convert(positions, DType::i64);
  const auto count = static_cast<std::size_t>(words.elements());
  const std::vector<std::int64_t> values(words.as<std::int64_t>(), words.as<std::int64_t>() + count);
  return {sent(values, operation, "sending the positions", workspace, stream), each ? positions.size(1) : 0, 1, true};
}

}  // namespace

void rope_on_device(const char* operation, const ConstTensorView& x, const ConstTensorView& positions,
                    const TensorView& out, const DeviceRotation& rotation, void* caller_stream) {
  const int device = x.device().index, rank = x.rank();
  const DeviceScope scope(device, operation);
  auto* stream = static_cast<cudaStream_t>(caller_stream);
  const bool each = positions.rank() == 2;
  const Turns turns{operation, rotation, each ? x.size(0) : 1, x.size(-2), x.dtype() == DType::f64};
  const std::size_t sent_bytes = travel(positions) ? words_bytes(static_cast<std::size_t>(positions.elements())) : 0;
  Workspace workspace(turns.bytes() + sent_bytes, device, stream, operation);
  RotateArguments arguments{};
  arguments.x = x.data();
  arguments.out = out.data();
  arguments.table = turns.place(placed(positions, operation, workspace, stream), workspace, stream);
  arguments.rows = turns.rows;
  arguments.width = x.size(-1);
  arguments.pairs = turns.pairs();
  arguments.batch = turns.batch;
  arguments.x_batch = each ? x.stride(0) : 0;
  arguments.out_batch = each ? out.stride(0) : 0;
  arguments.x_row = x.stride(rank - 2);
  arguments.out_row = out.stride(rank - 2);
  arguments.x_feature = x.stride(-1);
  arguments.out_feature = out.stride(-1);
  arguments.interleaved = rotation.interleaved;
  arguments.heads = 1;
  for (int axis = each ? 1 : 0; axis < rank - 2; ++axis) {
    const int n = arguments.axes++;
    arguments.sizes[n] = x.size(axis);
    arguments.x_steps[n] = x.stride(axis);
    arguments.out_steps[n] = out.stride(axis);
    arguments.heads *= x.size(axis);
  }
  check(launch_rotate(arguments, x.dtype(), stream), operation, "launching the rotation");
}

void append_on_device(const char* operation, const DeviceAppend& append, void* caller_stream) {
  const ConstTensorView& rows = append.rows;
  const auto tokens = static_cast<std::int64_t>(append.slots.size());
  if (tokens == 0 || append.pages.elements() == 0) {
    return;
  }
  const int device = rows.device().index;
  const DeviceScope scope(device, operation);
  auto* stream = static_cast<cudaStream_t>(caller_stream);
  std::optional<Turns> turns;
  if (append.rotation) {
    turns.emplace(Turns{operation, *append.rotation, 1, tokens, rows.dtype() == DType::f64});
  }
  const std::size_t words = words_bytes(append.slots.size());
  Workspace workspace(words + (turns ? words + turns->bytes() : 0), device, stream, operation);
  AppendArguments arguments{};
  arguments.rows = rows.data();
  arguments.each = append.packed ? tokens : rows.size(2);
  arguments.batch_step = append.packed ? 0 : rows.stride(0);
  arguments.row_step = rows.stride(append.packed ? 0 : 2);
  arguments.head_step = rows.stride(1);
  arguments.feature_step = rows.stride(-1);
  arguments.tokens = tokens;
  arguments.heads = append.pages.size(2);
  arguments.width = append.pages.size(3);
  arguments.slots = sent({append.slots.begin(), append.slots.end()}, operation, "sending the slots", workspace, stream);
  if (turns) {
    const std::vector<std::int64_t> positions(append.positions.begin(), append.positions.end());
    const Lengths placed_positions{sent(positions, operation, "sending the positions", workspace, stream), 0, 1, true};
    arguments.table = turns->place(placed_positions, workspace, stream);
    arguments.pairs = turns->pairs();
    arguments.interleaved = append.rotation->interleaved;
  }
  arguments.pages = append.pages.data();
  arguments.scales = append.scales ? static_cast<float*>(append.scales->data()) : nullptr;
  check(launch_append(arguments, rows.dtype(), append.pages.dtype(), stream), operation, "launching the append");
}

}  // namespace headway
