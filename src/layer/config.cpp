// Checking a layer's config, and the parameters that follow from it.
#include "layer/config.h"

#include "core/text.h"

namespace headway {
namespace {

template <class... Parts>
[[noreturn]] void refuse_config(const Parts&... parts) {
  throw InvalidArgument(text("MultiHeadAttention: ", parts...));
}

void require_positive(const char* field, std::int64_t value) {
  if (value < 1) {
    refuse_config("expected ", field, " of 1 or more, found ", value);
  }
}

// For fields in which 0 stands for the default.
void require_not_negative(const char* field, std::int64_t value) {
  if (value < 0) {
    refuse_config("expected ", field, " of 0 or more, found ", value);
  }
}

void require_small_enough(const MultiHeadAttentionConfig& config) {
  std::int64_t width = 0;
  if (__builtin_mul_overflow(config.heads, config.head_dim, &width)) {
    refuse_config("heads ", config.heads, " times head_dim ", config.head_dim, " is more than 2^63");
  }
  const auto element_bytes = static_cast<std::int64_t>(size_of(config.dtype));
  for (const ParameterSpec& spec : parameter_specs(config)) {
    std::int64_t bytes = element_bytes;
    for (const std::int64_t size : spec.sizes) {
      if (__builtin_mul_overflow(bytes, size, &bytes)) {
        refuse_config(spec.name, " of shape ", spec.sizes, " has more than 2^63 bytes");
      }
    }
  }
}

}  // namespace

const char* name(Initializer initializer) {
  switch (initializer) {
    case Initializer::xavier_uniform: return "xavier_uniform";
    case Initializer::torch_linear: return "torch_linear";
    case Initializer::uniform_01: return "uniform_01";
  }
  return "unknown";
}

MultiHeadAttentionConfig resolved(MultiHeadAttentionConfig config) {
  require_positive("model_dim", config.model_dim);
  require_positive("heads", config.heads);
  require_not_negative("kv_heads", config.kv_heads);
  require_not_negative("head_dim", config.head_dim);
  require_not_negative("key_dim", config.key_dim);
  require_not_negative("value_dim", config.value_dim);
  if (!is_float(config.dtype)) {
    throw TypeMismatch(text("MultiHeadAttention: expected a dtype of f32, f64, bf16 or f16, found ", config.dtype));
  }
  if (config.head_dim == 0) {
    if (config.model_dim % config.heads != 0) {
      refuse_config("model_dim ", config.model_dim, " is not divisible by heads ", config.heads);
    }
    config.head_dim = config.model_dim / config.heads;
  }
  if (config.kv_heads == 0) {
    config.kv_heads = config.heads;
  }
  if (config.heads % config.kv_heads != 0) {
    refuse_config("heads ", config.heads, " is not divisible by kv_heads ", config.kv_heads);
  }
  config.key_dim = config.key_dim == 0 ? config.model_dim : config.key_dim;
  config.value_dim = config.value_dim == 0 ? config.model_dim : config.value_dim;
  require_small_enough(config);
  return config;
}

std::vector<ParameterSpec> parameter_specs(const MultiHeadAttentionConfig& config) {
  const std::int64_t query_width = config.heads * config.head_dim;
  const std::int64_t kv_width = config.kv_heads * config.head_dim;
  struct Map {
    const char* letter;
    std::int64_t inputs, outputs;
  };
  const Map maps[] = {{"q", config.model_dim, query_width},
                      {"k", config.key_dim, kv_width},
                      {"v", config.value_dim, kv_width},
                      {"o", query_width, config.model_dim}};
  std::vector<ParameterSpec> specs;
  for (const auto& [letter, inputs, outputs] : maps) {
    specs.push_back(
        {text("W_", letter), static_cast<std::uint32_t>(specs.size()), Dims{inputs, outputs}, inputs, outputs});
  }
  if (config.bias) {
    for (const auto& [letter, inputs, outputs] : maps) {
      specs.push_back({text("b_", letter), static_cast<std::uint32_t>(specs.size()), Dims{outputs}, inputs, outputs});
    }
  }
  return specs;
}

}  // namespace headway
