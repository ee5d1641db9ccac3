// A layer as a .safetensors file: its parameters by name, its config as text in the metadata. A file is treated as
// hostile: nothing is allocated for what its config claims until the tensors in it are found to match.
#include <charconv>
#include <string_view>

#include "core/out_of_memory.h"
#include "core/text.h"
#include "headway/io.h"
#include "headway/layer.h"
#include "layer/config.h"
#include "layer/state.h"

namespace headway {
namespace {

constexpr const char* layer_kind = "headway.MultiHeadAttention";
constexpr const char* kind_key = "layer";

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

using Metadata = std::map<std::string, std::string>;

Metadata metadata_of(const MultiHeadAttentionConfig& config) {
  Metadata metadata = {{kind_key, layer_kind},
                       {"bias", config.bias ? "true" : "false"},
                       {"dtype", name(config.dtype)},
                       {"initializer", name(config.initializer)}};
  for_each_integer(config, [&](const char* key, auto number) { metadata[key] = std::to_string(number); });
  return metadata;
}

// Reads metadata; every error begins with the operation and the file.
class Reader {
 public:
  Reader(const std::filesystem::path& path, const Metadata& metadata) : path_(path), metadata_(metadata) {}

  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    throw FileError(text("MultiHeadAttention::load: ", path_.string(), ": ", parts...));
  }

  const std::string& value(const std::string& key) const {
    const auto found = metadata_.find(key);
    if (found == metadata_.end()) {
      refuse("expected the metadata to say ", key, ", found nothing");
    }
    return found->second;
  }

  template <class Integer>
  Integer integer(const std::string& key) const {
    const std::string& digits = value(key);
    Integer number{};
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
    if (error != std::errc{} || end != digits.data() + digits.size()) {
      refuse("expected ", key, " to be an integer, found \"", shortened(digits), "\"");
    }
    return number;
  }

  // The one of `choices` whose name the metadata gives.
  template <class Choice>
  Choice choice(const std::string& key, std::initializer_list<Choice> choices) const {
    std::string names;
    for (const Choice candidate : choices) {
      if (value(key) == name(candidate)) {
        return candidate;
      }
      names += text(names.empty() ? "" : ", ", name(candidate));
    }
    refuse("expected ", key, " to be one of ", names, ", found \"", shortened(value(key)), "\"");
  }

  // Text from the file in an error message: shortened, and in printable characters.
  static std::string shortened(std::string_view foreign) {
    constexpr std::size_t longest = 60;
    std::string result(foreign.substr(0, longest));
    for (char& c : result) {
      c = c >= ' ' && c <= '~' ? c : '?';
    }
    return foreign.size() > longest ? result + "..." : result;
  }

 private:
  const std::filesystem::path& path_;
  const Metadata& metadata_;
};

enum class YesNo : bool { no, yes };
const char* name(YesNo value) { return value == YesNo::yes ? "true" : "false"; }

MultiHeadAttentionConfig read_config(const Reader& reader) {
  if (reader.value(kind_key) != layer_kind) {
    reader.refuse("expected ", kind_key, " to be ", layer_kind, ", found \"", Reader::shortened(reader.value(kind_key)),
                  "\"");
  }
  MultiHeadAttentionConfig config;
  for_each_integer(config, [&](const char* key, auto& number) {
    number = reader.integer<std::remove_reference_t<decltype(number)>>(key);
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

// Takes one parameter out of the file's tensors.
Tensor take_parameter(const Reader& reader, const ParameterSpec& spec, DType dtype, NamedTensors& tensors) {
  auto entry = tensors.extract(spec.name);
  if (!entry) {
    reader.refuse("expected a tensor ", spec.name, ", found none");
  }
  Tensor& tensor = entry.mapped();
  if (tensor.dtype() != dtype) {
    reader.refuse(spec.name, " has type ", tensor.dtype(), ", expected ", dtype);
  }
  if (tensor.sizes() != spec.sizes) {
    reader.refuse(spec.name, " has shape ", tensor.sizes(), ", expected ", spec.sizes);
  }
  return std::move(tensor);
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
  const Reader reader(path, file.metadata);
  auto state = std::make_unique<State>();
  state->config = read_config(reader);
  for (const ParameterSpec& spec : parameter_specs(state->config)) {
    state->parameters.add(spec.name, take_parameter(reader, spec, state->config.dtype, file.tensors));
  }
  if (!file.tensors.empty()) {
    reader.refuse("found an unexpected tensor \"", Reader::shortened(file.tensors.begin()->first), "\"");
  }
  return {Loaded{}, std::move(state)};
} catch (...) {
  throw_own_error("MultiHeadAttention::load");
}

}  // namespace headway
