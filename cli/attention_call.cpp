// One attention call as the command line gives it.
#include "attention_call.h"

#include <algorithm>

#include "arguments.h"

namespace headway::cli {
namespace {

// (S,N*D) or (B,S,N*D) as (B,N,S,D)
ConstTensorView checked_split(const char* name, ConstTensorView joined, const char* option, std::int64_t heads) {
  if (joined.rank() != 2 && joined.rank() != 3) {
    throw UsageError(text("with --heads ", name,
                          " must have 3 axes (batch, length, heads * head_dim), or 2 without batch, ", "found shape ",
                          joined.sizes()));
  }
  if (joined.sizes().back() % heads != 0) {
    throw UsageError(
        text(name, " has width ", joined.sizes().back(), ", which is not divisible by ", option, " ", heads));
  }
  return split_heads(joined.rank() == 2 ? joined.unsqueeze(0) : joined, heads);
}

void add_head_count(CLI::App& app, const std::string& option, std::optional<std::int64_t>& target,
                    const std::string& help) {
  add_parsed(app, option, "N", help, [&target](const std::string& found) {
    target = parse_number<std::int64_t>(found);
    if (*target < 1) {
      throw UsageError(text("expected 1 or more, found ", found));
    }
  });
}

}  // namespace

void AttentionCallArguments::add_files_to(CLI::App& app, bool required, Values values) {
  const auto add = [&](const std::string& name, std::string& target, const std::string& help) {
    add_string(app, name, target, help).type_name("FILE").required(required);
  };
  add("query", query_, "(B,H,Sq,D), (B,Sq,D) or (Sq,D); with --heads (B,Sq,N*D) or (Sq,N*D)");
  add("key", key_, "(B,Hkv,Sk,D), without the axes that query lacks");
  if (values == Values::present) {
    add("value", value_, "(B,Hkv,Sk,Dv), without the axes that query lacks");
  }
}

void AttentionCallArguments::add_options_to(CLI::App& app) {
  add_head_count(app, "--heads", heads_, "Split the last axis into N heads, and join the output's again");
  add_head_count(app, "--kv-heads", kv_heads_, "Heads of key and value, if they have fewer");
  attention_.add_to(app);
}

std::vector<std::string> AttentionCallArguments::texts() const {
  std::vector<std::string> result = attention_.texts();
  for (const std::string& file : files()) {
    result.push_back(file);
  }
  return result;
}

AttentionCall AttentionCallArguments::load(TensorInputs& inputs) const {
  const ReadArray whole = [&](const std::string& name) { return inputs.load(name); };
  return load(inputs, {whole, whole, whole});
}

AttentionCall AttentionCallArguments::load(TensorInputs& inputs, const Readers& readers) const {
  if (kv_heads_ && !heads_) {
    throw UsageError("--kv-heads needs --heads: arrays with an axis for the heads say how many they have");
  }
  AttentionCall call{.query = readers.query(query_),
                     .key = readers.key(key_),
                     .value = readers.key(value_.empty() ? key_ : value_),
                     .options = attention_.options(inputs, readers.matrix)};
  return heads_ ? split_into_heads(call) : call;
}

AttentionCall AttentionCallArguments::split_into_heads(AttentionCall call) const {
  call.split = true;
  call.batch_axis_added = call.query.rank() == 2;
  for (const auto& [name, view] : {std::pair("key", call.key), std::pair("value", call.value)}) {
    if (view.rank() != call.query.rank()) {
      throw UsageError(
          text(name, " has shape ", view.sizes(), ", query has ", call.query.sizes(), ": expected as many axes"));
    }
  }
  const std::int64_t kv_heads = kv_heads_.value_or(*heads_);
  const char* kv_option = kv_heads_ ? "--kv-heads" : "--heads";
  call.query = checked_split("query", call.query, "--heads", *heads_);
  call.key = checked_split("key", call.key, kv_option, kv_heads);
  call.value = checked_split("value", call.value, kv_option, kv_heads);
  if (call.batch_axis_added) {
    call.options = with_batch_axis(call.options);
  }
  return call;
}

ConstTensorView stand_in(const Dims& sizes, DType dtype) {
  // Contiguous and aligned like a tensor from a file, because engines check that; nothing reads its elements.
  alignas(64) static constexpr double element = 0;
  return {&element, dtype, sizes};
}

}  // namespace headway::cli
