// A layer as a .safetensors file: its parameters by name, its config as text in the metadata. A file is treated as
// hostile: nothing is allocated for what its config claims until the tensors in it are found to match.
#include "core/out_of_memory.h"
#include "core/text.h"
#include "headway/io.h"
#include "headway/layer.h"
#include "io/metadata_reader.h"
#include "layer/config.h"
#include "layer/state.h"

namespace headway {
namespace {

constexpr const char* layer_kind = "headway.MultiHeadAttention";
constexpr const char* layer_kind_key = "layer";

// Calls visit(name, number) for each integer of the config: the one list that saving and loading share.
template <class Config, class Visit>
void for_each_integer(Config& config, const Visit& visit) {
  visit("model_dim", config.model_dim);
  visit("heads", config.heads);
  visit("kv_heads", config.kv_heads);
  visit("head_dim", config.head_dim);
  visit("key_dim", config.key_dim);
  visit("value_dim", config.value_dim);
  visit("seed", config.seed);
}

Metadata metadata_of(const MultiHeadAttentionConfig& config) {
  Metadata metadata = {{layer_kind_key, layer_kind},
                       {"bias", config.bias ? "true" : "false"},
                       {"dtype", name(config.dtype)},
                       {"initializer", name(config.initializer)}};
  for_each_integer(config, [&](const char* key, auto number) { metadata[key] = std::to_string(number); });
  return metadata;
}

MultiHeadAttentionConfig read_config(const MetadataReader& reader) {
  if (reader.value(layer_kind_key) != layer_kind) {
    reader.refuse("expected ", layer_kind_key, " to be ", layer_kind, ", found \"",
                  MetadataReader::shortened(reader.value(layer_kind_key)), "\"");
  }
  MultiHeadAttentionConfig config;
  for_each_integer(config, [&](const char* key, auto& number) {
    number = reader.number<std::remove_reference_t<decltype(number)>>(key);
  });
  config.bias = reader.choice("bias", {YesNo::no, YesNo::yes}) == YesNo::yes;
  config.dtype = reader.choice("dtype", {DType::f32, DType::f64, DType::bf16, DType::f16});
  config.initializer =
      reader.choice("initializer", {Initializer::xavier_uniform, Initializer::torch_linear, Initializer::uniform_01});
  try {
    const MultiHeadAttentionConfig checked = resolved(config);
    if (checked != config) {
      reader.refuse("expected the metadata to give every size, found a 0");
    }
    return checked;
  } catch (const InvalidArgument& error) {
    reader.refuse(error.what());
  }
}

}  // namespace

void MultiHeadAttention::save(const std::filesystem::path& path, bool overwrite) const try {
  // A file is written from host memory.
  std::optional<Parameters> copied;
  if (device() != Device{}) {
    copied = state().parameters.copied_to(Device{}, nullptr);
  }
  const Parameters::Named& named = (copied ? *copied : state().parameters).views();
  save_safetensors(path, {named.begin(), named.end()}, metadata_of(state().config), {.overwrite = overwrite});
} catch (...) {
  throw_own_error("MultiHeadAttention::save");
}

MultiHeadAttention MultiHeadAttention::load(const std::filesystem::path& path) try {
  SafetensorsFile file = load_safetensors(path);
  const MetadataReader reader("MultiHeadAttention::load", path, file.metadata);
  auto state = std::make_unique<State>();
  state->config = read_config(reader);
  for (const ParameterSpec& spec : parameter_specs(state->config)) {
    state->parameters.add(spec.name, take_tensor(reader, file.tensors, spec.name, spec.sizes, state->config.dtype));
  }
  if (!file.tensors.empty()) {
    reader.refuse("found an unexpected tensor \"", MetadataReader::shortened(file.tensors.begin()->first), "\"");
  }
  return {Loaded{}, std::move(state)};
} catch (...) {
  throw_own_error("MultiHeadAttention::load");
}

}  // namespace headway
