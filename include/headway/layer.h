// The multi-head attention layer: query, key, value and output projections around attention.
//
//   q = queries W_q + b_q,  k = keys W_k + b_k,  v = values W_v + b_v      each split into heads of head_dim
//   y = join(attention(q, k, v)) W_o + b_o
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "headway/attention.h"
#include "headway/cxx20.h"
#include "headway/io.h"
#include "headway/tensor.h"

#pragma GCC visibility push(default)
namespace headway {

// How parameters are drawn. Element e (counted in row-major order) of parameter p (W_q 0, W_k 1, W_v 2, W_o 3, b_q 4 to
// b_o 7) comes from Philox4x32-10 with key = seed and counter (e/2 low word, e/2 high word, p, 0x48454144): an even e
// takes words 0 and 1, an odd one words 2 and 3, low word first. The top 53 of those 64 bits are u in [0, 1); the value
// computed from u in float64 is rounded once to the parameter's type.
enum class Initializer : std::uint8_t {
  xavier_uniform,  // (2u - 1) a, a = sqrt(6 / (inputs + outputs)); biases 0
  torch_linear,    // (2u - 1) a, a = 1 / sqrt(inputs), biases too: the distribution of nn.Linear
  uniform_01,      // u, biases too; where rounding would reach 1, the largest number below it
};

const char* name(Initializer initializer);

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
  std::uint64_t seed = 0;  // the same seed gives the same parameters everywhere

  bool operator==(const MultiHeadAttentionConfig&) const = default;
};

// Gradients of a layer: of its inputs, in their shapes, and of each parameter by name. Where one tensor was queries,
// keys and values at once, its gradient is the sum of the three.
struct Gradients {
  Tensor queries, keys, values;
  NamedTensors parameters;
};

// Outputs of backward for the gradients of options, for training them.
struct OptionGradients {
  std::optional<TensorView> bias = {};   // the bias's own shape, any float type
  std::optional<TensorView> sinks = {};  // [heads], any float type
};

class MultiHeadAttention {
 public:
  explicit MultiHeadAttention(const MultiHeadAttentionConfig& config);
  ~MultiHeadAttention();
  MultiHeadAttention(MultiHeadAttention&&) noexcept;
  MultiHeadAttention& operator=(MultiHeadAttention&&) noexcept;

  // The given config, with every 0 replaced by its default.
  const MultiHeadAttentionConfig& config() const;

  // Where the parameters are: in host memory, until `to` moves them to a CUDA device or back, which invalidates views
  // of them and what forward kept for backward. On a device every call takes tensors of that device, queues its work on
  // AttentionOptions::stream and returns; results are on the device too, in the order of that stream. Projections need
  // cuBLASLt there; where query, key and value are one tensor they are one product. `stream` orders the copy.
  Device device() const;
  void to(Device device, void* stream = nullptr);

  // W_q [model_dim, heads*head_dim], W_k [key_dim, kv_heads*head_dim], W_v [value_dim, kv_heads*head_dim],
  // W_o [heads*head_dim, model_dim], and b_q, b_k, b_v, b_o where the layer has biases; in that order. On a device W_q,
  // W_k and W_v may be columns of one matrix.
  std::vector<std::pair<std::string, TensorView>> parameters();
  std::vector<std::pair<std::string, ConstTensorView>> parameters() const;
  TensorView parameter(const std::string& name);
  ConstTensorView parameter(const std::string& name) const;

  // queries [B,Sq,model_dim], keys [B,Sk,key_dim], values [B,Sk,value_dim] -> [B,Sq,model_dim]. All three may lack B:
  // weights are then [heads,Sq,Sk], lse [heads,Sq], and valid_lens and query_lens may lack B too.
  // forward keeps views of its inputs and options for backward: they and the parameters must stay alive and unchanged
  // until then. After a forward that throws, backward is an error.
  Tensor forward(ConstTensorView queries, ConstTensorView keys, ConstTensorView values,
                 const AttentionOptions& options = {}, const AttentionOutputs& outputs = {});

  // The same result, bit for bit, keeping nothing for backward; several threads may call it at once.
  Tensor infer(ConstTensorView queries, ConstTensorView keys, ConstTensorView values,
               const AttentionOptions& options = {}, const AttentionOutputs& outputs = {}) const;

  // The gradients of sum(grad_output * y) of the last forward; may be called again with another grad_output.
  Gradients backward(ConstTensorView grad_output, const OptionGradients& option_gradients = {});

  // Parameters and config as .safetensors; load checks every name, shape, type and number.
  void save(const std::filesystem::path& path, bool overwrite = false) const;
  static MultiHeadAttention load(const std::filesystem::path& path);

 private:
  struct State;
  struct Loaded {};  // with it the constructor has two parameters, so that MultiHeadAttention({}) is never this one
  MultiHeadAttention(Loaded, std::unique_ptr<State> state);
  State& state() const;  // InvalidArgument for a layer that was moved from

  std::unique_ptr<State> state_;
};

}  // namespace headway
#pragma GCC visibility pop
