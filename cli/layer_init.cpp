// headway layer-init: writes a layer with random parameters to a file.
#include <iostream>

#include "arguments.h"
#include "command.h"
#include "headway/headway.h"
#include "interrupt.h"
#include "output_files.h"
#include "tensor_inputs.h"

namespace headway::cli {
namespace {

constexpr const char* layer_init_examples = R"(Examples:
  headway layer-init --model-dim 512 --heads 8 --bias -o layer.safetensors
  headway layer-init --model-dim 512 --heads 8 --kv-heads 2 --dtype bf16 --seed 7 -o layer.safetensors)";

std::int64_t count_parameters(const MultiHeadAttention& layer) {
  std::int64_t count = 0;
  for (const auto& parameter : layer.parameters()) {
    count += parameter.second.elements();
  }
  return count;
}

class LayerInit final : public Command {
 public:
  explicit LayerInit(CLI::App& app) {
    CLI::App& command = add_command(app, "layer-init", "Makes a multi-head attention layer with random parameters",
                                    layer_init_examples);
    add_string(command, "-o,--output", path_, "The layer, a .safetensors file").type_name("FILE").required();
    add_flag(command, "--force", force_, "Replace an existing file");
    const auto integer = [&](const char* option, std::int64_t& target, const char* help) {
      return add_number<std::int64_t>(command, option, target, help);
    };
    integer("--model-dim", config_.model_dim, "Width of the queries and of the output").required();
    integer("--heads", config_.heads, "Attention heads").required();
    integer("--kv-heads", config_.kv_heads, "Heads of keys and values [as many as --heads]");
    integer("--head-dim", config_.head_dim, "Width of a head [model_dim / heads]");
    integer("--key-dim", config_.key_dim, "Width of the keys [model_dim]");
    integer("--value-dim", config_.value_dim, "Width of the values [model_dim]");
    add_flag(command, "--bias", config_.bias, "Give each projection a bias");
    add_choice(command, "--dtype", config_.dtype, float_types(), "Type of the parameters [f32]");
    Choices<Initializer> initializers;
    for (const auto initializer : {Initializer::xavier_uniform, Initializer::torch_linear, Initializer::uniform_01}) {
      initializers.emplace_back(name(initializer), initializer);
    }
    add_choice(command, "--initializer", config_.initializer, initializers,
               "Distribution of the parameters [xavier_uniform]");
    add_number<std::uint64_t>(command, "--seed", config_.seed, "The same seed gives the same parameters [0]");
  }

  void run() override {
    if (format_of(path_) != Format::safetensors) {
      throw UsageError(text("-o: expected a file name that ends in .safetensors, found ", path_));
    }
    check_target(path_, force_);
    const MultiHeadAttention layer(config_);
    finish_files_when_interrupted();
    throw_if_interrupted();
    layer.save(path_, force_);
    const MultiHeadAttentionConfig& made = layer.config();
    std::cout << text(printable(path_), "  model_dim ", made.model_dim, ", ", made.heads, " heads of ", made.head_dim,
                      ", ", made.dtype, "  ", count_parameters(layer), " parameters\n");
  }

 private:
  MultiHeadAttentionConfig config_;
  std::string path_;
  bool force_ = false;
};

}  // namespace

std::unique_ptr<Command> make_layer_init(CLI::App& app) { return std::make_unique<LayerInit>(app); }

}  // namespace headway::cli
