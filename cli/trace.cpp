// headway trace: every step of attention, with its numbers.
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <optional>

#include "arguments.h"
#include "attention_call.h"
#include "command.h"
#include "headway/headway.h"
#include "interrupt.h"
#include "output_files.h"
#include "text.h"
#include "tokens.h"

namespace headway::cli {
namespace {

constexpr const char* trace_examples = R"(Examples:
  headway trace q.npy k.npy v.npy --causal
  headway trace x.npy x.npy x.npy --heads 2 --tokens tokens.txt -o trace.html
  headway trace --layer layer.safetensors x.npy

For small inputs: a step with more than 16384 numbers is refused. The page is one file that needs nothing else.)";

class TraceCommand final : public Command {
 public:
  explicit TraceCommand(CLI::App& app) {
    CLI::App& command =
        add_command(app, "trace", "Every step of attention with its numbers, for small inputs", trace_examples);
    arguments_.add_files_to(command, false);
    add_text(command, "--layer", layer_,
             "A stored layer: query, key and value are then its inputs; a key that is not named is the query, a value "
             "the key");
    add_text(command, "-o,--output", output_, "A page to step through, a .html file, instead of the text")
        .group("Outputs");
    add_flag(command, "--force", force_, "Replace an existing file").group("Outputs");
    tokens_.add_to(command);
    add_string(command, "--title", request_.title, "The title [Attention, step by step]").type_name("TEXT");
    arguments_.add_options_to(command);
  }

  void run() override {
    if (output_) {
      check_output();
    }
    TensorInputs inputs;
    const Trace made = layer_ ? trace_layer(inputs) : trace_arrays(inputs);
    if (output_) {
      finish_files_when_interrupted();
      throw_if_interrupted();
      write_trace(*output_, made, force_);
      std::cout << text(printable(*output_), "  ", made.steps.size(), " steps\n");
    } else {
      std::cout << to_string(made, {.colour = ::isatty(STDOUT_FILENO) == 1 && std::getenv("NO_COLOR") == nullptr});
    }
  }

 private:
  void check_output() const {
    if (std::filesystem::path(*output_).extension() != ".html") {
      throw UsageError(text("-o: expected a file name that ends in .html, found ", *output_));
    }
    check_target(*output_, force_);
  }

  Trace trace_arrays(TensorInputs& inputs) {
    for (const std::string& file : arguments_.files()) {
      if (file.empty()) {
        throw UsageError("expected query, key and value, or --layer and its input");
      }
    }
    request_.heads = arguments_.heads().value_or(0);
    request_.kv_heads = arguments_.kv_heads().value_or(0);
    if (request_.kv_heads != 0 && request_.heads == 0) {
      throw UsageError("--kv-heads needs --heads: arrays with an axis for the heads say how many they have");
    }
    // Heads stay side by side: the trace itself splits them.
    const std::vector<std::string> files = arguments_.files();
    const ConstTensorView query = inputs.load(files[0]), key = inputs.load(files[1]), value = inputs.load(files[2]);
    load_tokens(query, key);
    return trace(query, key, value, arguments_.attention().options(inputs), request_);
  }

  Trace trace_layer(TensorInputs& inputs) {
    if (arguments_.heads() || arguments_.kv_heads()) {
      throw UsageError("--heads goes without --layer; a layer says how many heads it has");
    }
    const std::vector<std::string> files = arguments_.files();
    if (files[0].empty()) {
      throw UsageError("expected the layer's input");
    }
    const MultiHeadAttention layer = MultiHeadAttention::load(*layer_);
    const ConstTensorView queries = inputs.load(files[0]);
    const ConstTensorView keys = files[1].empty() ? queries : inputs.load(files[1]);
    const ConstTensorView values = files[2].empty() ? keys : inputs.load(files[2]);
    load_tokens(queries, keys);
    return trace(layer, queries, keys, values, arguments_.attention().options(inputs), request_);
  }

  void load_tokens(const ConstTensorView& queries, const ConstTensorView& keys) {
    request_.key_tokens = tokens_.keys(keys);
    request_.query_tokens = tokens_.queries(queries);
  }

  AttentionCallArguments arguments_;
  TraceRequest request_;
  TokenFiles tokens_;
  std::optional<std::string> layer_, output_;
  bool force_ = false;
};

}  // namespace

std::unique_ptr<Command> make_trace(CLI::App& app) { return std::make_unique<TraceCommand>(app); }

}  // namespace headway::cli
