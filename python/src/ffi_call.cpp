#include "ffi_call.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <span>
#include <string>

#include "errors.h"

namespace headway::python {
namespace {

constexpr std::string_view operand_names[] = {"grad_out", "query", "key",        "value",      "out",   "lse",
                                              "mask",     "bias",  "valid_lens", "query_lens", "spans", "alibi_slopes",
                                              "sinks",    "seed",  "weights",    "offset"};
static_assert(std::size(operand_names) == static_cast<std::size_t>(Operand::count));

Operand operand_named(std::string_view name) {
  for (std::size_t i = 0; i < std::size(operand_names); ++i) {
    if (operand_names[i] == name) {
      return static_cast<Operand>(i);
    }
  }
  throw InvalidArgument(text("headway.jax: there is no operand '", name, "'"));
}

DType element_type(xla::Type type, Operand operand) {
  switch (type) {
    case xla::Type::boolean: return DType::b8;
    case xla::Type::s32: return DType::i32;
    case xla::Type::s64: return DType::i64;
    case xla::Type::f16: return DType::f16;
    case xla::Type::f32: return DType::f32;
    case xla::Type::f64: return DType::f64;
    case xla::Type::bf16: return DType::bf16;
    case xla::Type::u32: break;
  }
  throw TypeMismatch(text("headway.jax: ", operand_names[static_cast<std::size_t>(operand)], " has XLA's type ",
                          static_cast<int>(type), ", expected a float, bool or integer type"));
}

// [B, S, H, D] where positions come first, [B, H, S, D] elsewhere.
bool has_positions_and_heads(Operand operand) {
  return operand == Operand::grad_out || operand == Operand::query || operand == Operand::key ||
         operand == Operand::value || operand == Operand::out;
}

bool has_batch_axis(Operand operand) {
  return operand != Operand::alibi_slopes && operand != Operand::sinks && operand != Operand::seed &&
         operand != Operand::offset;
}

Causal causal_named(std::string_view name) {
  if (name == "top_left") return Causal::top_left;
  if (name == "bottom_right") return Causal::bottom_right;
  return Causal::square;
}

Engine engine_named(std::string_view word) {
  for (const Engine engine : {Engine::reference, Engine::cpu, Engine::cuda}) {
    if (word == name(engine)) {
      return engine;
    }
  }
  return Engine::automatic;
}

// XLA's answer to a question about the call, or its error as an exception.
void check(const xla::CallFrame& frame, xla::Error* error, const char* question) {
  if (error == nullptr) {
    return;
  }
  xla::ErrorText said{sizeof(xla::ErrorText), nullptr, error, ""};
  frame.api->error_text(&said);
  const std::string message = text("headway.jax: asking XLA for ", question, ": ", said.message);
  xla::ErrorEnd end{sizeof(xla::ErrorEnd), nullptr, error};
  frame.api->destroy_error(&end);
  throw DeviceError(message);
}

}  // namespace

FfiPlace cuda_place(const xla::CallFrame& frame) {
  if (frame.api->struct_size < sizeof(xla::Api)) {
    throw Unsupported("headway.jax: this JAX does not say which GPU a call runs on; expected a later version");
  }
  xla::OrdinalRequest ordinal{sizeof(xla::OrdinalRequest), nullptr, frame.context, 0};
  check(frame, frame.api->get_ordinal(&ordinal), "the device");
  xla::StreamRequest stream{sizeof(xla::StreamRequest), nullptr, frame.context, nullptr};
  check(frame, frame.api->get_stream(&stream), "the stream");
  return {{DeviceType::cuda, ordinal.ordinal}, stream.stream};
}

// ---- Attributes ----

std::optional<std::string_view> FfiCall::text(std::string_view name) const {
  const xla::Attributes& attributes = frame_.attributes;
  for (std::int64_t i = 0; i < attributes.count; ++i) {
    if (name == std::string_view(attributes.names[i]->data, attributes.names[i]->size) &&
        attributes.kinds[i] == xla::AttributeKind::string) {
      const auto* bytes = static_cast<const xla::Bytes*>(attributes.values[i]);
      return std::string_view(bytes->data, bytes->size);
    }
  }
  return {};
}

template <class Value>
std::optional<Value> FfiCall::scalar(std::string_view name, xla::Type type) const {
  const xla::Attributes& attributes = frame_.attributes;
  for (std::int64_t i = 0; i < attributes.count; ++i) {
    if (name == std::string_view(attributes.names[i]->data, attributes.names[i]->size) &&
        attributes.kinds[i] == xla::AttributeKind::scalar) {
      const auto* scalar = static_cast<const xla::Scalar*>(attributes.values[i]);
      if (scalar->type != type) {
        throw TypeMismatch(python::text("headway.jax: ", name, " has XLA's type ", static_cast<int>(scalar->type)));
      }
      Value value;
      std::memcpy(&value, scalar->value, sizeof value);
      return value;
    }
  }
  return {};
}

void FfiCall::read_options() {
  positions_first_ = text("layout") == "BSHD";
  if (const auto causal = text("causal")) {
    options_.causal = causal_named(*causal);
  }
  const auto left = scalar<std::int64_t>("window_left", xla::Type::s64);
  const auto right = scalar<std::int64_t>("window_right", xla::Type::s64);
  if (left || right) {
    options_.window = Window{left, right};
  }
  options_.scale = scalar<double>("scale", xla::Type::f64);
  options_.softcap = scalar<double>("softcap", xla::Type::f64);
  options_.dropout = scalar<double>("dropout", xla::Type::f64).value_or(0.0);
  options_.span_rows = scalar<std::int64_t>("span_rows", xla::Type::s64).value_or(1);
  if (const auto engine = text("engine")) {
    options_.engine = engine_named(*engine);
  }
}

// ---- Buffers ----

FfiCall::FfiCall(const xla::CallFrame& frame, const FfiPlace& place) : frame_(frame), place_(place) {
  read_options();
  options_.stream = place.stream;
  operands_ = slots("operands", frame.arguments);
  results_ = slots("results", frame.results);
  // A result has every mapped axis; the first one is [B, .., .., ..] besides.
  const xla::Buffer& first = *results_.front().buffer;
  mapped_axes_ = static_cast<int>(first.rank) - 4;
  mapped_sizes_ = first.sizes;
  for (int axis = 0; axis < mapped_axes_; ++axis) {
    mapped_items_ *= mapped_sizes_[axis];
  }
  batch_ = mapped_sizes_[mapped_axes_];
  // Dropout counts batch items, and each item of a vmap has its own batch.
  folded_ = options_.dropout == 0;
  for (const Slot& slot : operands_) {
    folded_ = folded_ && can_fold(slot, false);
  }
  for (const Slot& slot : results_) {
    folded_ = folded_ && can_fold(slot, true);
  }
}

std::vector<FfiCall::Slot> FfiCall::slots(std::string_view attribute, const xla::Buffers& buffers) const {
  std::vector<Slot> result;
  std::string_view list = text(attribute).value_or("");
  for (std::int64_t i = 0; i < buffers.count; ++i) {
    const std::size_t space = list.find(' ');
    result.push_back({operand_named(list.substr(0, space)), buffers.buffers[i]});
    list = space == std::string_view::npos ? "" : list.substr(space + 1);
  }
  return result;
}

bool FfiCall::is_shared(const xla::Buffer& buffer) const {
  return std::all_of(buffer.sizes, buffer.sizes + mapped_axes_, [](std::int64_t size) { return size == 1; });
}

// Whether the items and their batches are one axis of the buffer, or one element stands for all.
bool FfiCall::can_fold(const Slot& slot, bool is_result) const {
  const xla::Buffer& buffer = *slot.buffer;
  if (mapped_items_ == 1) {
    return true;
  }
  if (!has_batch_axis(slot.operand)) {
    return !is_result && is_shared(buffer);
  }
  const std::int64_t batch = buffer.sizes[mapped_axes_];
  return (batch == batch_ && std::equal(buffer.sizes, buffer.sizes + mapped_axes_, mapped_sizes_)) ||
         (batch == 1 && !is_result && is_shared(buffer));
}

// Of an item's first element.
std::int64_t FfiCall::offset(const xla::Buffer& buffer, std::int64_t index) const {
  std::int64_t stride = 1;
  for (std::int64_t axis = mapped_axes_; axis < buffer.rank; ++axis) {
    stride *= buffer.sizes[axis];
  }
  std::int64_t result = 0;
  for (int axis = mapped_axes_ - 1; axis >= 0; --axis) {
    if (buffer.sizes[axis] != 1) {
      result += index % mapped_sizes_[axis] * stride;
    }
    index /= mapped_sizes_[axis];
    stride *= buffer.sizes[axis];
  }
  return result;
}

TensorView FfiCall::view(const Slot& slot, std::int64_t index) const {
  const xla::Buffer& buffer = *slot.buffer;
  const DType dtype = element_type(buffer.type, slot.operand);
  Dims sizes(std::span(buffer.sizes + mapped_axes_, static_cast<std::size_t>(buffer.rank - mapped_axes_)));
  Dims strides = contiguous_strides(sizes);
  auto* data = static_cast<char*>(buffer.data);
  if (!folded_) {
    data += offset(buffer, index) * static_cast<std::int64_t>(size_of(dtype));
  } else if (has_batch_axis(slot.operand) && mapped_items_ > 1) {
    sizes[0] = mapped_items_ * batch_;
    strides[0] = is_shared(buffer) ? 0 : strides[0];
  }
  const TensorView whole(data, dtype, sizes, strides, place_.device);
  return positions_first_ && has_positions_and_heads(slot.operand) ? whole.transpose(1, 2) : whole;
}

// The first 32-bit words of an item. Waits for the device, if they lie there.
template <std::size_t count>
std::array<std::int32_t, count> FfiCall::words(const Slot& slot, std::int64_t index) const {
  const auto* data = static_cast<const std::int32_t*>(slot.buffer->data) + offset(*slot.buffer, index);
  const Dims sizes = {static_cast<std::int64_t>(count)};
  std::array<std::int32_t, count> result;
  copy(ConstTensorView(data, DType::i32, sizes, place_.device), TensorView(result.data(), DType::i32, sizes),
       place_.stream);
  return result;
}

FfiItem FfiCall::item(std::int64_t index) const {
  FfiItem item;
  item.options = options_;
  for (const Slot& slot : operands_) {
    if (slot.operand == Operand::seed) {
      const auto [low, high] = words<2>(slot, index);
      item.options.seed = static_cast<std::uint32_t>(low) | std::uint64_t{static_cast<std::uint32_t>(high)} << 32;
    } else if (slot.operand == Operand::offset) {
      item.offset = words<1>(slot, index)[0];
    } else {
      item.operands[slot.operand] = view(slot, index);
    }
  }
  item.options.mask = item.operands[Operand::mask];
  item.options.bias = item.operands[Operand::bias];
  item.options.valid_lens = item.operands[Operand::valid_lens];
  item.options.query_lens = item.operands[Operand::query_lens];
  item.options.spans = item.operands[Operand::spans];
  item.options.alibi_slopes = item.operands[Operand::alibi_slopes];
  item.options.sinks = item.operands[Operand::sinks];
  for (const Slot& slot : results_) {
    item.results[slot.operand] = view(slot, index);
  }
  return item;
}

}  // namespace headway::python
