// One attention call as the command line gives it: three arrays, how they are split into heads, and the options.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention_arguments.h"
#include "headway/attention.h"
#include "tensor_inputs.h"

namespace headway::cli {

// The views that attention takes. With --heads they are (B,N,S,D) over the memory of (B,S,N*D), and arrays without a
// batch axis have one of size 1.
struct AttentionCall {
  ConstTensorView query, key, value;
  AttentionOptions options;
  bool split = false;  // by --heads
  bool batch_axis_added = false;
};

// Whether a command reads values too.
enum class Values { present, absent };

class AttentionCallArguments {
 public:
  void add_files_to(CLI::App& app, bool required, Values values = Values::present);
  void add_options_to(CLI::App& app);  // --heads, --kv-heads and all of AttentionArguments

  std::vector<std::string> files() const { return {query_, key_, value_}; }  // empty texts where none is named
  std::vector<std::string> texts() const;
  AttentionCall load(TensorInputs& inputs) const;  // without values, the keys stand in for them
  // The same with other ways to read the arrays: a rank of several reads its rows.
  struct Readers {
    ReadArray query, key, matrix;
  };
  AttentionCall load(TensorInputs& inputs, const Readers& readers) const;

  const std::optional<std::int64_t>& heads() const { return heads_; }
  const std::optional<std::int64_t>& kv_heads() const { return kv_heads_; }
  const AttentionArguments& attention() const { return attention_; }

 private:
  AttentionCall split_into_heads(AttentionCall call) const;

  std::string query_, key_, value_;
  std::optional<std::int64_t> heads_, kv_heads_;
  AttentionArguments attention_;
};

// A (B,S,N*D) tensor as (B,N,S,D): the same memory, other strides.
template <class Void>
BasicTensorView<Void> split_heads(BasicTensorView<Void> joined, std::int64_t heads) {
  return joined.unflatten(2, {heads, joined.size(2) / heads}).transpose(1, 2);
}

// A view of any size over the memory of one element, for explain() only, which reads nothing.
ConstTensorView stand_in(const Dims& sizes, DType dtype);

}  // namespace headway::cli
