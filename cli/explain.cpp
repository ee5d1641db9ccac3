// headway explain: what attention would run, and why.
#include <algorithm>
#include <iostream>
#include <optional>

#include "arguments.h"
#include "attention_call.h"
#include "command.h"
#include "headway/headway.h"
#include "json.h"

namespace headway::cli {
namespace {

constexpr const char* explain_examples = R"(Examples:
  headway explain q.npy k.npy v.npy --causal
  headway explain --shape 2,8,4096,4096,64 --dtype bf16 --window 128,0
  headway explain --shape 1,32,1,8192,128 --kv-heads 8 --backward)";

std::string json_of(const AttentionCall& call, const Plan& plan) {
  std::vector<std::string> passed_over;
  for (const auto& [engine, reason] : plan.passed_over) {
    passed_over.push_back(text("{\"engine\": ", json(name(engine)), ", \"reason\": ", json(reason), "}"));
  }
  std::vector<std::string> passed_kernels;
  for (const auto& [kernel, reason] : plan.passed_kernels) {
    passed_kernels.push_back(text("{\"kernel\": ", json(kernel), ", \"reason\": ", json(reason), "}"));
  }
  return JsonObject()
      .add("operation", plan.operation)
      .add("engine", name(plan.engine))
      .add("kernel", plan.kernel)
      .add("instruction_set", plan.instruction_set)
      .add("query", call.query.sizes())
      .add("key", call.key.sizes())
      .add("value", call.value.sizes())
      .add("dtype", name(call.query.dtype()))
      .add("shape", plan.shape)
      .add("options", plan.options)
      .add("query_block", plan.query_block)
      .add("key_block", plan.key_block)
      .add("tasks", plan.tasks)
      .add("threads", std::int64_t{plan.threads})
      .add("splits", std::int64_t{plan.splits})
      .add("pairs", plan.pairs)
      .add("all_pairs", plan.all_pairs)
      .add("flops", plan.flops)
      .add("bytes", plan.bytes)
      .add("scratch_bytes", plan.scratch_bytes)
      .add_raw("passed_over", json_list(passed_over))
      .add_raw("passed_kernels", json_list(passed_kernels))
      .str();
}

class Explain final : public Command {
 public:
  explicit Explain(CLI::App& app) {
    CLI::App& command =
        add_command(app, "explain", "What attention would run, and why; runs nothing", explain_examples);
    arguments_.add_files_to(command, false);
    add_parsed(command, "--shape", "B,H,Sq,Sk,D[,Dv]", "Sizes, instead of files",
               [this](const std::string& found) { shape_ = parse_shape(found); });
    add_choice(command, "--dtype", dtype_, float_types(), "Element type, with --shape [f32]");
    add_flag(command, "--backward", request_.backward, "The backward pass instead of the forward one");
    add_flag(command, "--weights", request_.weights, "A call that returns the weights too");
    add_flag(command, "--lse", request_.lse, "A call that returns the lse too");
    add_flag(command, "--json", as_json_, "As JSON, for programs");
    arguments_.add_options_to(command);
  }

  void run() override {
    TensorInputs inputs;
    const AttentionCall call = shape_.empty() ? call_from_files(inputs) : call_from_shape(inputs);
    const Plan plan = headway::explain(call.query, call.key, call.value, call.options, request_);
    as_json_ ? std::cout << json_of(call, plan) << '\n' : std::cout << plan;
  }

 private:
  static std::vector<std::int64_t> parse_shape(const std::string& found) {
    std::vector<std::int64_t> shape = parse_numbers<std::int64_t>(found);
    if (shape.size() != 5 && shape.size() != 6) {
      throw UsageError(text("expected 5 or 6 numbers B,H,Sq,Sk,D[,Dv], found ", found));
    }
    return shape;
  }

  AttentionCall call_from_files(TensorInputs& inputs) const {
    const std::vector<std::string> names = arguments_.files();
    if (std::find(names.begin(), names.end(), "") != names.end()) {
      throw UsageError("expected query, key and value, or --shape");
    }
    if (dtype_) {
      throw UsageError("--dtype goes with --shape; files have a type of their own");
    }
    return arguments_.load(inputs);
  }

  AttentionCall call_from_shape(TensorInputs& inputs) const {
    if (!arguments_.files()[0].empty()) {
      throw UsageError("expected either files or --shape, found both");
    }
    if (arguments_.heads()) {
      throw UsageError("--heads goes with files; --shape says how many heads there are");
    }
    const std::int64_t batch = shape_[0], heads = shape_[1], queries = shape_[2], keys = shape_[3];
    const std::int64_t head_dim = shape_[4], value_dim = shape_.size() == 6 ? shape_[5] : head_dim;
    const std::int64_t kv_heads = arguments_.kv_heads().value_or(heads);
    const DType dtype = dtype_.value_or(DType::f32);
    return {.query = stand_in({batch, heads, queries, head_dim}, dtype),
            .key = stand_in({batch, kv_heads, keys, head_dim}, dtype),
            .value = stand_in({batch, kv_heads, keys, value_dim}, dtype),
            .options = arguments_.attention().options(inputs)};
  }

  AttentionCallArguments arguments_;
  std::vector<std::int64_t> shape_;
  std::optional<DType> dtype_;
  ExplainRequest request_;
  bool as_json_ = false;
};

}  // namespace

std::unique_ptr<Command> make_explain(CLI::App& app) { return std::make_unique<Explain>(app); }

}  // namespace headway::cli
