// The layer on a CUDA device, against the textbook and against the layer in host memory.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <thread>

#include "attention/cuda_engine.h"
#include "engines/cuda/cublas_lt.h"
#include "layer_support.h"

namespace headway::test {
namespace {

constexpr Device gpu{DeviceType::cuda, 0};

class LayerCuda : public testing::Test {
 protected:
  void SetUp() override { skip_without_cuda(); }
};

double tolerance(DType dtype) { return 32 * unit_roundoff(dtype); }

MultiHeadAttention layer_on_gpu(const MultiHeadAttentionConfig& config) {
  MultiHeadAttention layer = random_layer(config);
  layer.to(gpu);
  return layer;
}

Inputs on_gpu(const Inputs& in) {
  return {copied_to(in.queries, gpu), copied_to(in.keys, gpu), copied_to(in.values, gpu)};
}

// Every gradient by name.
std::map<std::string, std::vector<double>> all_of(const Gradients& gradients) {
  std::map<std::string, std::vector<double>> result;
  for (const auto& [name, tensor] : gradients.parameters) result[name] = numbers(tensor);
  result["queries"] = numbers(gradients.queries);
  result["keys"] = numbers(gradients.keys);
  result["values"] = numbers(gradients.values);
  return result;
}

void expect_same_gradients(const Gradients& found, const Gradients& expected, double allowed, const std::string& what) {
  const auto ours = all_of(found), theirs = all_of(expected);
  ASSERT_EQ(ours.size(), theirs.size());
  for (const auto& [name, values] : theirs) {
    // A shift of all keys changes no weight, so the gradient of b_k is 0: what is left of terms that cancel, as large
    // as those of W_k.
    const double scale = name == "b_k" ? std::max(1.0, largest(theirs.at("W_k"))) : 1.0;
    expect_close(ours.at(name), values, allowed * scale, what + " " + name);
  }
}

TEST_F(LayerCuda, agrees_with_the_textbook_for_every_shape_and_type) {
  for (const DType dtype : float_types) {
    for (const auto& [name, config] : config_zoo(dtype)) {
      const MultiHeadAttention layer = layer_on_gpu(config);
      const Inputs in = random_inputs(layer.config(), 2, 3, 5), there = on_gpu(in);
      const Tensor y = layer.infer(there.queries, there.keys, there.values);
      EXPECT_EQ(y.device(), gpu);
      EXPECT_EQ(y.sizes(), (Dims{2, 3, config.model_dim}));
      expect_close(numbers(y), textbook(layer, in).y, tolerance(dtype), name + std::string(" ") + headway::name(dtype));
    }
  }
}

TEST_F(LayerCuda, has_the_gradients_of_the_layer_in_host_memory) {
  const Tensor lens = Tensor::of<std::int64_t>({2}, {4, 2});
  for (const DType dtype : float_types) {
    for (const auto& [name, config] : config_zoo(dtype)) {
      for (const AttentionOptions& options :
           {AttentionOptions{}, AttentionOptions{.valid_lens = lens, .dropout = 0.25, .seed = 7}}) {
        MultiHeadAttention here = random_layer(config), there = layer_on_gpu(config);
        const Inputs in = random_inputs(here.config(), 2, 3, 5), in_there = on_gpu(in);
        const Tensor dy = random_tensor({2, 3, config.model_dim}, dtype, 50);
        here.forward(in.queries, in.keys, in.values, options);
        there.forward(in_there.queries, in_there.keys, in_there.values, options);
        const Gradients expected = here.backward(dy), found = there.backward(copied_to(dy, gpu));
        EXPECT_EQ(found.parameters.at("W_q").device(), gpu);
        expect_same_gradients(found, expected, 4 * tolerance(dtype), name + std::string(" ") + headway::name(dtype));
      }
    }
  }
}

TEST_F(LayerCuda, takes_one_tensor_for_all_three_and_for_keys_and_values) {
  for (const DType dtype : float_types) {
    for (const bool bias : {false, true}) {
      const MultiHeadAttentionConfig config{.model_dim = 24, .heads = 4, .kv_heads = 2, .bias = bias, .dtype = dtype};
      MultiHeadAttention here = random_layer(config), there = layer_on_gpu(config);
      const Tensor x = random_tensor({2, 9, 24}, dtype, 7), memory = random_tensor({2, 11, 24}, dtype, 8);
      const Tensor dy = random_tensor({2, 9, 24}, dtype, 9);
      const Tensor x_there = copied_to(x, gpu), memory_there = copied_to(memory, gpu), dy_there = copied_to(dy, gpu);
      expect_close(numbers(there.forward(x_there, x_there, x_there)), numbers(here.forward(x, x, x)), tolerance(dtype),
                   "self");
      expect_same_gradients(there.backward(dy_there), here.backward(dy), 4 * tolerance(dtype), "self");
      expect_close(numbers(there.forward(x_there, memory_there, memory_there)),
                   numbers(here.forward(x, memory, memory)), tolerance(dtype), "cross");
      expect_same_gradients(there.backward(dy_there), here.backward(dy), 4 * tolerance(dtype), "cross");
    }
  }
}

TEST_F(LayerCuda, of_a_usual_size_agrees_with_float64_and_repeats_its_bits) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    MultiHeadAttentionConfig config{
        .model_dim = 256, .heads = 4, .bias = true, .dtype = dtype, .initializer = Initializer::torch_linear};
    MultiHeadAttention there(config);
    config.dtype = DType::f64;
    MultiHeadAttention exact(config);
    for (auto& [name, view] : exact.parameters()) copy(there.parameter(name), view);
    there.to(gpu);
    const Tensor x = random_tensor({2, 200, 256}, dtype, 3), dy = random_tensor({2, 200, 256}, dtype, 4);
    const Tensor wide = convert(x, DType::f64), wide_dy = convert(dy, DType::f64);
    const Tensor x_there = copied_to(x, gpu), dy_there = copied_to(dy, gpu);
    const Tensor y = there.forward(x_there, x_there, x_there, {.causal = Causal::top_left});
    expect_close(numbers(y), numbers(exact.forward(wide, wide, wide, {.causal = Causal::top_left})),
                 8 * unit_roundoff(dtype) + 1e-6, "y");
    const Gradients found = there.backward(dy_there);
    expect_same_gradients(found, exact.backward(wide_dy), 16 * unit_roundoff(dtype) + 1e-5, name(dtype));
    for (int repeat = 0; repeat < 20; ++repeat) {
      EXPECT_TRUE(same_bits(there.forward(x_there, x_there, x_there, {.causal = Causal::top_left}), y));
      const Gradients again = there.backward(dy_there);
      for (const auto& [name, tensor] : found.parameters) EXPECT_TRUE(same_bits(tensor, again.parameters.at(name)));
      EXPECT_TRUE(same_bits(found.queries, again.queries));
    }
  }
}

TEST_F(LayerCuda, reads_every_layout) {
  const MultiHeadAttentionConfig config{.model_dim = 6, .heads = 2, .bias = true, .dtype = DType::f64};
  MultiHeadAttention here = random_layer(config), there = layer_on_gpu(config);
  const Tensor x = random_tensor({6, 5, 4}, DType::f64, 7), dy = random_tensor({6, 5, 4}, DType::f64, 8);
  const Tensor x_there = copied_to(x, gpu), dy_there = copied_to(dy, gpu);
  // [B,S,model_dim] out of [6,5,4]: features, batch or length outermost, backwards, every second row.
  const auto layouts = [](const Tensor& t) {
    const ConstTensorView view = t.view();
    return std::vector<ConstTensorView>{view.permute({2, 1, 0}), view.permute({1, 2, 0}),
                                        view.permute({2, 1, 0}).flip(1), view.permute({2, 1, 0}).flip(2),
                                        view.permute({2, 1, 0}).slice(1, 1, 3).expand({4, 2, 6})};
  };
  const auto here_views = layouts(x), there_views = layouts(x_there), dys = layouts(dy), dys_there = layouts(dy_there);
  for (std::size_t n = 0; n < here_views.size(); ++n) {
    const std::string what = "layout " + std::to_string(n);
    expect_close(numbers(there.forward(there_views[n], there_views[n], there_views[n])),
                 numbers(here.forward(here_views[n], here_views[n], here_views[n])), 1e-14, what);
    expect_same_gradients(there.backward(dys_there[n]), here.backward(dys[n]), 1e-13, what);
  }
}

TEST_F(LayerCuda, a_nan_that_no_query_may_see_changes_no_bit) {
  const Tensor lens = Tensor::of<std::int64_t>({2}, {70, 41});
  for (const DType dtype : float_types) {
    MultiHeadAttention layer = layer_on_gpu({.model_dim = 32, .heads = 2, .bias = true, .dtype = dtype});
    const Tensor queries = copied_to(random_tensor({2, 66, 32}, dtype, 1), gpu);
    const Tensor dy = copied_to(random_tensor({2, 66, 32}, dtype, 2), gpu);
    const auto run = [&](double hidden) {
      Tensor keys = random_tensor({2, 80, 32}, DType::f64, 3);
      for (std::int64_t b = 0; b < 2; ++b) {
        for (std::int64_t j = lens.at<std::int64_t>({b}); j < 80; ++j) {
          for (std::int64_t e = 0; e < 32; ++e) keys.at<double>({b, j, e}) = hidden;
        }
      }
      const Tensor there = copied_to(convert(keys, dtype), gpu);
      Tensor y = layer.forward(queries, there, there, {.valid_lens = lens});
      return std::pair(std::move(y), layer.backward(dy));
    };
    const auto [y, gradients] = run(0.0);
    for (const double hidden : {double{NAN}, double{INFINITY}}) {
      const auto [found, found_gradients] = run(hidden);
      EXPECT_TRUE(same_bits(found, y));
      for (const auto& [name, tensor] : found_gradients.parameters) {
        const auto values = numbers(tensor);
        EXPECT_TRUE(std::none_of(values.begin(), values.end(), [](double v) { return std::isnan(v); })) << name;
        expect_close(values, numbers(gradients.parameters.at(name)), 2 * unit_roundoff(dtype) + 1e-6, name);
      }
    }
  }
}

TEST_F(LayerCuda, a_nan_that_a_query_sees_is_in_the_gradients) {
  MultiHeadAttention layer = layer_on_gpu({.model_dim = 8, .heads = 2});
  Tensor x = random_tensor({1, 5, 8}, DType::f32, 1);
  x.at<float>({0, 2, 3}) = NAN;
  const Tensor there = copied_to(x, gpu);
  layer.forward(there, there, there);
  const Gradients gradients = layer.backward(copied_to(random_tensor({1, 5, 8}, DType::f32, 2), gpu));
  EXPECT_TRUE(std::isnan(numbers(gradients.parameters.at("W_v"))[3 * 8]));
}

TEST_F(LayerCuda, returns_weights_and_lse_on_request_without_changing_the_output) {
  for (const DType dtype : float_types) {
    MultiHeadAttention layer = layer_on_gpu({.model_dim = 8, .heads = 4, .kv_heads = 2, .dtype = dtype});
    const Inputs in = random_inputs(layer.config(), 2, 3, 5), there = on_gpu(in);
    Tensor weights({2, 4, 3, 5}, dtype, gpu), rows({3, 2, 4}, dtype == DType::f64 ? DType::f64 : DType::f32, gpu);
    const TensorView lse = rows.view().permute({1, 2, 0});
    const Tensor y = layer.forward(there.queries, there.keys, there.values, {}, {.lse = lse, .weights = weights});
    expect_close(numbers(weights), textbook(layer, in).weights, tolerance(dtype), "weights");
    EXPECT_GT(largest(numbers(lse)), 0.0);
    EXPECT_TRUE(same_bits(y, layer.infer(there.queries, there.keys, there.values)));
    const Tensor dy = copied_to(random_tensor({2, 3, 8}, dtype, 9), gpu);
    const Gradients with_own_lse = layer.backward(dy);
    layer.forward(there.queries, there.keys, there.values);
    EXPECT_TRUE(same_bits(with_own_lse.queries, layer.backward(dy).queries));
  }
}

TEST_F(LayerCuda, inputs_without_a_batch_and_empty_ones_are_legal) {
  MultiHeadAttention layer = layer_on_gpu({.model_dim = 6, .heads = 2, .bias = true});
  const Inputs in = random_inputs(layer.config(), 1, 3, 5), there = on_gpu(in);
  const auto row = [](const Tensor& t) { return t.view().select(0, 0); };
  const Tensor y = layer.infer(row(there.queries), row(there.keys), row(there.values));
  EXPECT_EQ(y.sizes(), (Dims{3, 6}));
  EXPECT_TRUE(same_bits(y, layer.infer(there.queries, there.keys, there.values).view().select(0, 0)));

  const Tensor none({2, 0, 6}, DType::f32, gpu), some = copied_to(random_tensor({2, 3, 6}, DType::f32, 1), gpu);
  EXPECT_EQ(layer.forward(none, some, some).sizes(), (Dims{2, 0, 6}));
  EXPECT_EQ(largest(numbers(layer.backward(none).parameters.at("W_k"))), 0.0);
  const Tensor alone = layer.forward(some, none, none);
  EXPECT_TRUE(same_bits(alone.view().select(0, 1).select(0, 2), layer.parameter("b_o")));
  EXPECT_EQ(largest(numbers(layer.backward(some).parameters.at("W_v"))), 0.0);
}

TEST_F(LayerCuda, batch_invariant_rows_have_the_same_bits_alone) {
  MultiHeadAttention layer = layer_on_gpu({.model_dim = 64, .heads = 2, .bias = true, .dtype = DType::bf16});
  const Tensor x = copied_to(random_tensor({5, 33, 64}, DType::bf16, 1), gpu);
  const Tensor y = layer.infer(x, x, x, {.batch_invariant = true});
  for (std::int64_t b = 0; b < 5; ++b) {
    const ConstTensorView one = x.view().slice(0, b, b + 1);
    EXPECT_TRUE(same_bits(layer.infer(one, one, one, {.batch_invariant = true}), y.view().slice(0, b, b + 1)));
  }
}

TEST_F(LayerCuda, nothing_waits_for_the_device) {
  MultiHeadAttention layer = layer_on_gpu({.model_dim = 64, .heads = 2, .bias = true, .dtype = DType::bf16});
  const Tensor x = copied_to(random_tensor({2, 33, 64}, DType::bf16, 1), gpu);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // the copies are in the order of another stream
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  {
    const AttentionOptions options{.stream = stream};
    const Tensor expected = layer.forward(x, x, x, options);  // loads what is loaded once
    const Gradients expected_gradients = layer.backward(x);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);

    std::atomic<bool> may_go = false;
    const auto wait = [](void* flag) {
      const auto begin = std::chrono::steady_clock::now();
      while (!*static_cast<std::atomic<bool>*>(flag) &&
             std::chrono::steady_clock::now() - begin < std::chrono::seconds(10)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    };
    ASSERT_EQ(cudaLaunchHostFunc(stream, wait, &may_go), cudaSuccess);
    const auto begin = std::chrono::steady_clock::now();
    const Tensor y = layer.forward(x, x, x, options);
    const Gradients gradients = layer.backward(x);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
    EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
    may_go = true;
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_TRUE(same_bits(y, expected));
    EXPECT_TRUE(same_bits(gradients.values, expected_gradients.values));
  }
  layer.to(Device{});  // what backward would need belongs to the stream
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST_F(LayerCuda, keeps_its_parameters_on_the_way_there_and_back) {
  for (const auto& [name, config] : config_zoo(DType::bf16)) {
    const MultiHeadAttention original = random_layer(config);
    MultiHeadAttention layer = layer_on_gpu(config);
    EXPECT_EQ(layer.device(), gpu);
    for (const auto& [parameter, view] : original.parameters()) {
      EXPECT_EQ(layer.parameter(parameter).device(), gpu);
      EXPECT_TRUE(same_bits(layer.parameter(parameter), view)) << name << " " << parameter;
    }
    layer.to(Device{});
    EXPECT_EQ(layer.device(), Device{});
    for (const auto& [parameter, view] : original.parameters()) {
      EXPECT_TRUE(same_bits(layer.parameter(parameter), view)) << name << " " << parameter;
    }
  }
}

TEST_F(LayerCuda, is_saved_from_the_device) {
  MultiHeadAttention layer = layer_on_gpu({.model_dim = 8, .heads = 4, .kv_heads = 2, .bias = true});
  const auto path =
      std::filesystem::temp_directory_path() / ("layer_cuda_" + std::to_string(getpid()) + ".safetensors");
  try {
    layer.save(path);
  } catch (const Unsupported& missing) {
    GTEST_SKIP() << missing.what();
  }
  const MultiHeadAttention loaded = MultiHeadAttention::load(path);
  std::filesystem::remove(path);
  EXPECT_EQ(loaded.device(), Device{});
  for (const auto& [name, view] : loaded.parameters()) EXPECT_TRUE(same_bits(layer.parameter(name), view)) << name;
}

TEST_F(LayerCuda, tensors_elsewhere_and_other_engines_are_refused) {
  MultiHeadAttention layer = layer_on_gpu({.model_dim = 8, .heads = 2});
  const Tensor here({2, 3, 8}), there({2, 3, 8}, DType::f32, gpu);
  EXPECT_EQ(error_text<InvalidArgument>([&] { layer.infer(there, here, there); }),
            "MultiHeadAttention::infer: keys is on cpu, the layer's parameters are on cuda:0");
  layer.forward(there, there, there);
  EXPECT_EQ(error_text<InvalidArgument>([&] { layer.backward(here); }),
            "MultiHeadAttention::backward: grad_output is on cpu, the layer's parameters are on cuda:0");
  const std::string engine =
      error_text<Unsupported>([&] { layer.infer(there, there, there, {.engine = Engine::cpu}); });
  EXPECT_NE(
      engine.find("MultiHeadAttention::infer: the requested engine cannot run this (cpu: the tensors are on cuda:0"),
      std::string::npos)
      << engine;
  layer.to(Device{});
  EXPECT_EQ(error_text<InvalidArgument>([&] { layer.infer(there, there, there); }),
            "MultiHeadAttention::infer: queries is on cuda:0, the layer's parameters are on cpu");
  EXPECT_EQ(error_text<InvalidArgument>([&] { layer.backward(here); }),
            "MultiHeadAttention::backward: expected a forward before it, found none");
}

TEST(LayerCudaErrors, a_missing_cublas_lt_is_named) {
  const std::string text =
      error_text<Unsupported>([] { cuda::lt::load("MultiHeadAttention::infer", "libnot_there.so.1"); });
  EXPECT_EQ(text.rfind("MultiHeadAttention::infer: projections on a GPU need cuBLASLt, part of the CUDA toolkit, and "
                       "libnot_there.so.1 could not be loaded: ",
                       0),
            0u)
      << text;
  const std::string other = error_text<Unsupported>([] { cuda::lt::load("MultiHeadAttention::infer", "libm.so.6"); });
  EXPECT_EQ(other.rfind("MultiHeadAttention::infer: the cuBLASLt that was found has no cublasLtCreate: ", 0), 0u)
      << other;
}

}  // namespace
}  // namespace headway::test
