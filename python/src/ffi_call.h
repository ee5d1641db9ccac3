// One call from XLA: its buffers as views, its attributes as options.
//
// jax.vmap puts axes in front of every buffer, of size 1 where a buffer is the same for all items. A call with such
// axes is the batch of its items where that is one view of every buffer, and a loop over them elsewhere.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "headway/headway.h"
#include "xla_ffi.h"

namespace headway::python {

// What an operand is, or what a result has the axes of. The attributes "operands" and "results" list them by name.
enum class Operand : std::size_t {
  grad_out,
  query,
  key,
  value,
  out,
  lse,
  mask,
  bias,
  valid_lens,
  query_lens,
  spans,
  alibi_slopes,
  sinks,
  seed,
  weights,
  offset,
  count
};

template <class View>
class FfiViews {
 public:
  std::optional<View>& operator[](Operand operand) { return views_[static_cast<std::size_t>(operand)]; }
  const std::optional<View>& operator[](Operand operand) const { return views_[static_cast<std::size_t>(operand)]; }

 private:
  std::array<std::optional<View>, static_cast<std::size_t>(Operand::count)> views_;
};

// The views of one call to the library, heads before positions whatever the buffers' order is.
struct FfiItem {
  FfiViews<ConstTensorView> operands;
  FfiViews<TensorView> results;
  AttentionOptions options;
  std::optional<std::int64_t> offset;  // of a part of a longer call
};

// Where XLA has the buffers of a call, and in which order it wants work done there.
struct FfiPlace {
  Device device;
  void* stream = nullptr;
};
FfiPlace cuda_place(const xla::CallFrame& frame);

class FfiCall {
 public:
  FfiCall(const xla::CallFrame& frame, const FfiPlace& place);

  std::int64_t items() const { return folded_ && mapped_items_ > 0 ? 1 : mapped_items_; }
  FfiItem item(std::int64_t index) const;

 private:
  struct Slot {
    Operand operand;
    const xla::Buffer* buffer;
  };

  std::optional<std::string_view> text(std::string_view name) const;
  template <class Value>
  std::optional<Value> scalar(std::string_view name, xla::Type type) const;

  std::vector<Slot> slots(std::string_view attribute, const xla::Buffers& buffers) const;
  void read_options();
  bool is_shared(const xla::Buffer& buffer) const;
  bool can_fold(const Slot& slot, bool is_result) const;
  std::int64_t offset(const xla::Buffer& buffer, std::int64_t index) const;
  TensorView view(const Slot& slot, std::int64_t index) const;
  template <std::size_t count>
  std::array<std::int32_t, count> words(const Slot& slot, std::int64_t index) const;

  const xla::CallFrame& frame_;
  const FfiPlace place_;
  std::vector<Slot> operands_, results_;
  AttentionOptions options_;  // without views and seed
  bool positions_first_ = false;
  int mapped_axes_ = 0;
  std::int64_t mapped_items_ = 1;
  const std::int64_t* mapped_sizes_ = nullptr;
  std::int64_t batch_ = 0;
  bool folded_ = false;
};

}  // namespace headway::python
