// The multi-head attention layer: query, key, value and output projections around attention.
//
//   q = queries W_q + b_q,  k = keys W_k + b_k,  v = values W_v + b_v      each split into heads of head_dim
//   y = join(attention(q, k, v)) W_o + b_o
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "headway/attention.h"
#include "headway/tensor.h"

namespace headway {

enum class Initializer : std::uint8_t {
  xavier_uniform,  // U(-a, a), a = sqrt(6 / (inputs + outputs)); biases 0
  torch_linear,    // U(-a, a), a = 1 / sqrt(inputs), biases too: what nn.Linear draws
  uniform_01,      // U[0, 1), biases too: what document 003 draws
};

struct MultiHeadAttentionConfig {
  std::int64_t model_dim = 0;  // width of the queries and of the output
  std::int64_t heads = 1;
  std::int64_t kv_heads = 0;   // 0: as many as heads; fewer for grouped-query attention
  std::int64_t head_dim = 0;   // 0: model_dim / heads
  std::int64_t key_dim = 0;    // width of the keys' input; 0: model_dim
  std::int64_t value_dim = 0;  // width of the values' input; 0: model_dim
  bool bias = false;           // b_q, b_k, b_v, b_o
  DType dtype = DType::f32;
  Initializer initializer = Initializer::xavier_uniform;
  std::uint64_t seed = 0;      // the same seed gives the same parameters everywhere
};

// Gradients of a layer: of its inputs, and of each parameter by name.
struct Gradients {
  Tensor queries, keys, values;
  std::map<std::string, Tensor> parameters;
};

class MultiHeadAttention {
 public:
  explicit MultiHeadAttention(const MultiHeadAttentionConfig& config);
  ~MultiHeadAttention();
  MultiHeadAttention(MultiHeadAttention&&) noexcept;
  MultiHeadAttention& operator=(MultiHeadAttention&&) noexcept;

  const MultiHeadAttentionConfig& config() const;

  // W_q [model_dim, heads*head_dim], W_k [key_dim, kv_heads*head_dim], W_v [value_dim, kv_heads*head_dim],
  // W_o [heads*head_dim, model_dim], and b_q, b_k, b_v, b_o where the layer has biases; in that order.
  std::vector<std::pair<std::string, TensorView>> parameters();
  std::vector<std::pair<std::string, ConstTensorView>> parameters() const;
  TensorView parameter(const std::string& name);
  ConstTensorView parameter(const std::string& name) const;

  // queries [B,Sq,model_dim], keys [B,Sk,key_dim], values [B,Sk,value_dim] -> [B,Sq,model_dim]; all three may lack B.
  // forward remembers views of its inputs for backward, so they must stay alive and unchanged until then.
  Tensor forward(ConstTensorView queries, ConstTensorView keys, ConstTensorView values,
                 const AttentionOptions& options = {}, const AttentionOutputs& outputs = {});

  // The same result, remembering nothing; several threads may call it at once.
  Tensor infer(ConstTensorView queries, ConstTensorView keys, ConstTensorView values,
               const AttentionOptions& options = {}, const AttentionOutputs& outputs = {}) const;

  // The gradients of sum(grad_output * y) of the last forward.
  Gradients backward(ConstTensorView grad_output);

  // Parameters and shape as .safetensors; load checks every name, shape and type.
  void save(const std::filesystem::path& path, bool overwrite = false) const;
  static MultiHeadAttention load(const std::filesystem::path& path);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace headway
