// headway layer: a stored multi-head attention layer over arrays.
#include <chrono>
#include <optional>

#include "arguments.h"
#include "attention_arguments.h"
#include "attention_call.h"
#include "command.h"
#include "headway/headway.h"
#include "interrupt.h"
#include "output_files.h"
#include "progress_line.h"
#include "text.h"

namespace headway::cli {
namespace {

constexpr const char* layer_examples = R"(Examples:
  headway layer layer.safetensors x.npy -o y.npy --causal
  headway layer layer.safetensors queries.npy --keys memory.npy -o y.npy --weights w.npy

layer-init makes a layer to try, and random makes arrays.)";

struct LayerCall {
  ConstTensorView queries, keys, values;
  AttentionOptions options;

  bool batched() const { return queries.rank() == 3; }
};

// `sizes` begin with the batch axis, which the user's arrays may lack.
Dims callers_sizes(const LayerCall& call, const Dims& sizes) {
  return call.batched() ? sizes : Dims(std::span(sizes.begin() + 1, sizes.end()));
}

// The engine that the layer's attention ran on, found from sizes alone because the projections stay inside the layer.
Engine engine_of(const MultiHeadAttentionConfig& config, const LayerCall& call, const AttentionOutputs& outputs) {
  const int length = call.queries.rank() - 2;
  const std::int64_t batch = call.batched() ? call.queries.size(0) : 1;
  const ConstTensorView query =
      stand_in({batch, config.heads, call.queries.size(length), config.head_dim}, config.dtype);
  const ConstTensorView key = stand_in({batch, config.kv_heads, call.keys.size(length), config.head_dim}, config.dtype);
  return explain(query, key, key, call.batched() ? call.options : with_batch_axis(call.options),
                 {.lse = outputs.lse.has_value(), .weights = outputs.weights.has_value()})
      .engine;
}

class Layer final : public Command {
 public:
  explicit Layer(CLI::App& app) {
    CLI::App& command = add_command(app, "layer", "Runs a stored multi-head attention layer on arrays", layer_examples);
    add_string(command, "layer", layer_, "The layer, as layer-init and MultiHeadAttention::save write it")
        .type_name("FILE")
        .required();
    add_string(command, "queries", queries_, "(B,Sq,model_dim) or (Sq,model_dim)").type_name("FILE").required();
    add_text(command, "--keys", keys_, "(B,Sk,key_dim) [the queries]");
    add_text(command, "--values", values_, "(B,Sk,value_dim) [the keys]");
    outputs_.add_to(command, "out", "The result, (B,Sq,model_dim)");
    outputs_.add_optional(command, "--weights", "weights", "The attention weights, (B,H,Sq,Sk), before dropout");
    outputs_.add_optional(command, "--lse", "lse", "The logarithm of each row's sum, (B,H,Sq)");
    attention_.add_to(command);
  }

  void run() override {
    outputs_.check(texts());
    const MultiHeadAttention layer = MultiHeadAttention::load(layer_);
    outputs_.check_type(layer.config().dtype);
    TensorInputs inputs;
    LayerCall call = load(inputs);
    throw_if_interrupted();
    infer(layer, call);
  }

 private:
  std::vector<std::string> texts() const {
    std::vector<std::string> result = attention_.texts();
    result.push_back(layer_);
    result.push_back(queries_);
    result.push_back(keys_.value_or(""));
    result.push_back(values_.value_or(""));
    return result;
  }

  LayerCall load(TensorInputs& inputs) const {
    LayerCall call;
    call.queries = inputs.load(queries_);
    call.keys = keys_ ? inputs.load(*keys_) : call.queries;
    call.values = values_ ? inputs.load(*values_) : call.keys;
    call.options = attention_.options(inputs);
    return call;
  }

  void infer(const MultiHeadAttention& layer, LayerCall& call) const {
    const MultiHeadAttentionConfig& config = layer.config();
    Tensor weights, lse;
    const AttentionOutputs asked = allocate(config, call, weights, lse);
    const auto start = std::chrono::steady_clock::now();
    Tensor out;
    {
      ProgressLine line;
      call.options.progress = line.callback();
      out = layer.infer(call.queries, call.keys, call.values, call.options, asked);
    }
    const auto elapsed = std::chrono::steady_clock::now() - start;
    const std::string remark = text(name(engine_of(config, call, asked)), " engine  ", duration_text(elapsed));
    const NamedViews views = {{"out", out}, {"weights", weights}, {"lse", lse}};
    outputs_.write(views);
    outputs_.summarize(views, remark);
  }

  AttentionOutputs allocate(const MultiHeadAttentionConfig& config, const LayerCall& call, Tensor& weights,
                            Tensor& lse) const {
    // Everything else is checked by infer, before it uses these.
    if ((call.queries.rank() != 2 && call.queries.rank() != 3) || call.keys.rank() != call.queries.rank()) {
      return {};
    }
    const int length = call.queries.rank() - 2;
    const std::int64_t batch = call.queries.size(0), rows = call.queries.size(length);
    AttentionOutputs asked;
    if (outputs_.wants("weights")) {
      weights =
          Tensor::uninitialized(callers_sizes(call, {batch, config.heads, rows, call.keys.size(length)}), config.dtype);
      asked.weights = weights.view();
    }
    if (outputs_.wants("lse")) {
      lse = Tensor::uninitialized(callers_sizes(call, {batch, config.heads, rows}),
                                  config.dtype == DType::f64 ? DType::f64 : DType::f32);
      asked.lse = lse.view();
    }
    return asked;
  }

  std::string layer_, queries_;
  std::optional<std::string> keys_, values_;
  AttentionArguments attention_;
  OutputFiles outputs_;
};

}  // namespace

std::unique_ptr<Command> make_layer(CLI::App& app) { return std::make_unique<Layer>(app); }

}  // namespace headway::cli
