// Attention on CUDA tensors, for benchmarks/gpu.py: contiguous [B,H,S,D], with the options that it times.
#include <headway/headway.h>

#include <exception>
#include <string>

using namespace headway;

namespace {

struct GpuCall {
  const void *query, *key, *value;
  void* out;
  float* lse;
  std::int64_t batch, heads, kv_heads, query_len, key_len, head_dim;
  int dtype;                 // of query, key, value and out: a DType
  int causal;                // bottom_right
  std::int64_t window_left;  // -1: none
  double softcap;            // 0: none
  double dropout;
  const float* slopes;  // [H], or null
  const bool* mask;     // [Sq,Sk], or null
  const void* bias;     // [Sq,Sk] of dtype, or null
  void* stream;
  const void* grad_out;  // of dtype; null: forward
  void *dq, *dk, *dv;
  const std::int32_t* spans;  // [Sq,R,2], or null
  std::int64_t span_count;    // R
};

std::string last_error;

AttentionOptions options_of(const GpuCall& call, DType dtype, Device device) {
  const Dims matrix = {call.query_len, call.key_len};
  AttentionOptions options{.engine = Engine::cuda, .stream = call.stream};
  if (call.causal != 0) options.causal = Causal::bottom_right;
  if (call.window_left >= 0) options.window = Window{call.window_left, 0};
  if (call.softcap > 0) options.softcap = call.softcap;
  options.dropout = call.dropout;
  if (call.dropout > 0) options.seed = 1;
  if (call.slopes) options.alibi_slopes = ConstTensorView(call.slopes, DType::f32, {call.heads}, device);
  if (call.mask) options.mask = ConstTensorView(call.mask, DType::b8, matrix, device);
  if (call.bias) options.bias = ConstTensorView(call.bias, dtype, matrix, device);
  if (call.spans)
    options.spans = ConstTensorView(call.spans, DType::i32, {1, 1, call.query_len, call.span_count, 2}, device);
  return options;
}

struct Views {
  ConstTensorView query, key, value;
};

Views views_of(const GpuCall& call, DType dtype, Device device) {
  const Dims keys = {call.batch, call.kv_heads, call.key_len, call.head_dim};
  return {ConstTensorView(call.query, dtype, {call.batch, call.heads, call.query_len, call.head_dim}, device),
          ConstTensorView(call.key, dtype, keys, device), ConstTensorView(call.value, dtype, keys, device)};
}

}  // namespace

// Forward, or backward where grad_out is given. Null, or what went wrong.
extern "C" const char* headway_gpu_attention(const GpuCall* call) {
  try {
    const Device device{DeviceType::cuda, 0};
    const auto dtype = static_cast<DType>(call->dtype);
    const Views views = views_of(*call, dtype, device);
    const Dims rows = {call->batch, call->heads, call->query_len},
               queries = {rows[0], rows[1], rows[2], call->head_dim};
    const TensorView out(call->out, dtype, queries, device), lse(call->lse, DType::f32, rows, device);
    const AttentionOptions options = options_of(*call, dtype, device);
    if (call->grad_out == nullptr) {
      attention(views.query, views.key, views.value, out, options, {.lse = lse});
      return nullptr;
    }
    const Dims keys = {call->batch, call->kv_heads, call->key_len, call->head_dim};
    attention_backward(ConstTensorView(call->grad_out, dtype, queries, device), views.query, views.key, views.value,
                       out, lse,
                       {.dq = TensorView(call->dq, dtype, queries, device),
                        .dk = TensorView(call->dk, dtype, keys, device),
                        .dv = TensorView(call->dv, dtype, keys, device)},
                       options);
    return nullptr;
  } catch (const std::exception& error) {
    last_error = error.what();
    return last_error.c_str();
  }
}

// analyze() of the call's query and key, with so many listed keys a row; what it finds is let go.
extern "C" const char* headway_gpu_analyze(const GpuCall* call, std::int64_t top) {
  try {
    const Device device{DeviceType::cuda, 0};
    const auto dtype = static_cast<DType>(call->dtype);
    const Views views = views_of(*call, dtype, device);
    analyze(views.query, views.key, options_of(*call, dtype, device), {.top = top});
    return nullptr;
  } catch (const std::exception& error) {
    last_error = error.what();
    return last_error.c_str();
  }
}

// The kernel's name, and the queries and keys of one of its tiles.
extern "C" const char* headway_gpu_kernel(const GpuCall* call, std::int64_t* tile_queries, std::int64_t* tile_keys) {
  try {
    const Device device{DeviceType::cuda, 0};
    const auto dtype = static_cast<DType>(call->dtype);
    const Views views = views_of(*call, dtype, device);
    const Plan plan = explain(views.query, views.key, views.value, options_of(*call, dtype, device),
                              {.backward = call->grad_out != nullptr});
    *tile_queries = plan.query_block;
    *tile_keys = plan.key_block;
    last_error = plan.kernel;
  } catch (const std::exception& error) {
    last_error = error.what();
  }
  return last_error.c_str();
}
