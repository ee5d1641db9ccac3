// Tensors of more than 2^31 elements, and more keys than a team of the Hopper backward has members, on the CUDA engine.
#include <gtest/gtest.h>

#include <cmath>
#include <future>
#include <string>

#include "attention/cuda_engine.h"
#include "attention/cuda_memory.h"
#include "support/inputs.h"

namespace headway::test {
namespace {

constexpr std::int64_t head_dim = 64;

std::size_t bytes_of(std::int64_t rows, std::int64_t columns = head_dim) {
  return static_cast<std::size_t>(rows * columns) * 2;
}

// Rows [first, first + rows) of a matrix of halves on the device.
void write_rows(const Memory& memory, std::int64_t first, const Tensor& rows, std::int64_t columns = head_dim) {
  ASSERT_EQ(cudaMemcpy(static_cast<std::uint16_t*>(memory.get()) + first * columns, rows.data(),
                       static_cast<std::size_t>(rows.elements()) * 2, cudaMemcpyHostToDevice),
            cudaSuccess);
}

Tensor read_rows(const Memory& memory, std::int64_t first, std::int64_t rows, std::int64_t columns = head_dim) {
  Tensor result({1, 1, rows, columns}, DType::bf16);
  EXPECT_EQ(cudaMemcpy(result.data(), static_cast<std::uint16_t*>(memory.get()) + first * columns,
                       bytes_of(rows, columns), cudaMemcpyDeviceToHost),
            cudaSuccess);
  return result;
}

// One key: every row of out is that key's value.
TEST_F(CudaEngine, writes_tensors_of_more_than_two_to_the_31_elements) {
  const std::int64_t rows = (std::int64_t{1} << 25) + 7, width = 64;
  Tensor one = Tensor({1, 1, 1, width}, DType::bf16);
  for (std::int64_t d = 0; d < width; ++d) set(one, {0, 0, 0, d}, static_cast<double>(d));
  const Memory key = copied(one), out(static_cast<std::size_t>(rows * width) * 2);
  if (out.get() == nullptr) GTEST_SKIP() << "the device has no 4 GiB free";
  const TensorView k = key.view(DType::bf16, {1, 1, 1, width});
  attention(ConstTensorView(k).expand({1, 1, rows, width}), k, k, out.view(DType::bf16, {1, 1, rows, width}));
  Tensor last({1, 1, 1, width}, DType::bf16);
  ASSERT_EQ(cudaMemcpy(last.data(), static_cast<std::uint16_t*>(out.get()) + (rows - 1) * width, 2 * width,
                       cudaMemcpyDeviceToHost),
            cudaSuccess);
  EXPECT_TRUE(same_bits(last, one));
}

// Zeros, but for the last keys' values: the window of the last query sees those alone.
TEST_F(CudaEngine, reads_tensors_of_more_than_two_to_the_31_elements) {
  const std::int64_t keys = (std::int64_t{1} << 24) + 5, width = 160;
  const auto bytes = static_cast<std::size_t>(keys * width) * 2;
  const Memory cache(bytes);
  if (cache.get() == nullptr) GTEST_SKIP() << "the device has no 5 GiB free";
  ASSERT_EQ(cudaMemset(cache.get(), 0, bytes), cudaSuccess);
  const Tensor ones = filled({8, width}, DType::bf16, 1.0), query({1, 1, 1, width}, DType::bf16);
  ASSERT_EQ(cudaMemcpy(static_cast<std::uint16_t*>(cache.get()) + (keys - 8) * width, ones.data(), 16 * width,
                       cudaMemcpyHostToDevice),
            cudaSuccess);
  const Memory q = copied(query), out = copied(query);
  const Dims sizes{1, 1, 1, width};
  const TensorView k = cache.view(DType::bf16, {1, 1, keys, width});
  attention(q.view(DType::bf16, sizes), k, k, out.view(DType::bf16, sizes),
            {.causal = Causal::bottom_right, .window = Window{7, 0}});
  EXPECT_TRUE(same_bits(fetched(out, sizes, DType::bf16), filled(sizes, DType::bf16, 1.0)));
}

// Queries are 0 but for the last ones.
TEST_F(CudaEngine, attends_from_more_than_two_to_the_31_elements_on_hopper) {
  const std::int64_t rows = (std::int64_t{1} << 25) + 133, last = 100, keys = 200;
  const Memory q(bytes_of(rows)), out(bytes_of(rows));
  if (q.get() == nullptr || out.get() == nullptr) GTEST_SKIP() << "the device has no 9 GiB free";
  ASSERT_EQ(cudaMemset(q.get(), 0, bytes_of(rows)), cudaSuccess);
  Inputs inputs = random_inputs({.batch = 1,
                                 .heads = 1,
                                 .kv_heads = 1,
                                 .queries = last,
                                 .keys = keys,
                                 .head_dim = head_dim,
                                 .value_dim = head_dim},
                                DType::bf16);
  write_rows(q, rows - last, inputs.q);
  const Memory k = copied(inputs.k), v = copied(inputs.v);
  const TensorView queries = q.view(DType::bf16, {1, 1, rows, head_dim}),
                   keys_view = k.view(DType::bf16, inputs.k.sizes());
  for (Causal causal : {Causal::none, Causal::bottom_right}) {
    const AttentionOptions options{.causal = causal, .engine = Engine::cuda};
    if (explain(queries, keys_view, keys_view, options).kernel.find("hopper_forward") == std::string::npos)
      GTEST_SKIP() << "no Hopper GPU";
    attention(queries, keys_view, v.view(DType::bf16, inputs.v.sizes()), out.view(DType::bf16, {1, 1, rows, head_dim}),
              options);
    expect_forward(inputs.call(options), read_rows(out, rows - last, last));
    if (causal == Causal::none) {
      const Tensor zero({1, 1, 1, head_dim}, DType::bf16);
      expect_forward(Call{zero, inputs.k, inputs.v, options, {}}, read_rows(out, 12345, 1));
    }
  }
}

// Keys and values are 0 but for the last ones, which are all that the window shows.
TEST_F(CudaEngine, attends_to_more_than_two_to_the_31_elements_on_hopper) {
  const std::int64_t keys = (std::int64_t{1} << 25) + 77, last = 150, queries = 140;
  const Memory k(bytes_of(keys)), v(bytes_of(keys)), out(bytes_of(queries));
  if (k.get() == nullptr || v.get() == nullptr) GTEST_SKIP() << "the device has no 9 GiB free";
  ASSERT_EQ(cudaMemset(k.get(), 0, bytes_of(keys)), cudaSuccess);
  ASSERT_EQ(cudaMemset(v.get(), 0, bytes_of(keys)), cudaSuccess);
  Inputs inputs = random_inputs({.batch = 1,
                                 .heads = 1,
                                 .kv_heads = 1,
                                 .queries = queries,
                                 .keys = last,
                                 .head_dim = head_dim,
                                 .value_dim = head_dim},
                                DType::bf16);
  write_rows(k, keys - last, inputs.k);
  write_rows(v, keys - last, inputs.v);
  const Memory q = copied(inputs.q);
  const TensorView query = q.view(DType::bf16, inputs.q.sizes()), key = k.view(DType::bf16, {1, 1, keys, head_dim});
  const AttentionOptions options{.causal = Causal::bottom_right, .window = Window{9, 0}, .engine = Engine::cuda};
  if (explain(query, key, key, options).kernel.find("hopper_forward") == std::string::npos)
    GTEST_SKIP() << "no Hopper GPU";
  attention(query, key, v.view(DType::bf16, {1, 1, keys, head_dim}), out.view(DType::bf16, inputs.q.sizes()), options);
  expect_forward(inputs.call(options), read_rows(out, 0, queries));
}

// With K and V of 0 every weight is 2^-24, and dV that part of the sum of grad_out's rows. One NaN in grad_out reaches
// its feature of every key's dV.
TEST_F(CudaEngine, finds_gradients_of_more_than_two_to_the_31_elements) {
  const std::int64_t keys = std::int64_t{1} << 24, queries = 64, columns = 128;
  const Memory k(bytes_of(keys, columns)), dk(bytes_of(keys, columns)), dv(bytes_of(keys, columns));
  if (k.get() == nullptr || dk.get() == nullptr || dv.get() == nullptr) GTEST_SKIP() << "the device has no 13 GiB free";
  ASSERT_EQ(cudaMemset(k.get(), 0, bytes_of(keys, columns)), cudaSuccess);
  Random random(1);
  const Tensor query = normal({1, 1, queries, columns}, DType::bf16, random);
  Tensor grad = normal({1, 1, queries, columns}, DType::bf16, random);
  set(grad, {0, 0, 3, 5}, NAN);
  const Memory q = copied(query), grad_out = copied(grad), out = copied(query), lse(queries * 4);
  const auto rows = [&](const Memory& memory) { return memory.view(DType::bf16, {1, 1, queries, columns}); };
  const TensorView key = k.view(DType::bf16, {1, 1, keys, columns});
  const TensorView lse_view = lse.view(DType::f32, {1, 1, queries});
  attention(rows(q), key, key, rows(out), {.engine = Engine::cuda}, {.lse = lse_view});
  attention_backward(
      rows(grad_out), rows(q), key, key, rows(out), lse_view,
      {.dk = dk.view(DType::bf16, {1, 1, keys, columns}), .dv = dv.view(DType::bf16, {1, 1, keys, columns})},
      {.engine = Engine::cuda});
  const Array grads = read(grad);
  for (std::int64_t j : {std::int64_t{0}, keys / 2 + 1, keys - 1}) {
    const Tensor found = read_rows(dv, j, 1, columns);
    for (std::int64_t d = 0; d < columns; ++d) {
      Real sum = 0, size = 0;
      for (std::int64_t i = 0; i < queries; ++i) sum += grads(0, 0, i, d), size += std::abs(grads(0, 0, i, d));
      const double value = get(found, {0, 0, 0, d});
      if (d == 5)
        EXPECT_TRUE(std::isnan(value)) << j;
      else
        EXPECT_NEAR(value, static_cast<double>(sum) * 0x1p-24, static_cast<double>(size) * 0x1p-24 * 0x1p-6)
            << j << ' ' << d;
    }
  }
}

// 133 tiles of keys: more than a team has members at once. The oracle takes seconds, so cases run beside each other.
TEST_F(CudaEngine, finds_gradients_over_more_tiles_of_keys_than_a_team_has_members) {
  std::vector<std::future<void>> running;
  for (const auto& [dim, causal] : std::vector<std::pair<std::int64_t, Causal>>{
           {64, Causal::none}, {64, Causal::bottom_right}, {128, Causal::none}}) {
    const auto inputs = std::make_shared<Inputs>(random_inputs(
        {.batch = 1, .heads = 2, .kv_heads = 1, .queries = 30, .keys = 17000, .head_dim = dim, .value_dim = dim},
        DType::bf16));
    const Call call = inputs->call({.causal = causal, .engine = Engine::cuda});
    Random random(3);
    const auto grad_out = std::make_shared<Tensor>(normal(call.out_sizes(), DType::bf16, random));
    const auto gradients = std::make_shared<GradientTensors>(call.gradients(*grad_out));
    EXPECT_TRUE(same_bits(call.gradients(*grad_out), *gradients));
    running.push_back(std::async(
        std::launch::async, [inputs, call, grad_out, gradients] { expect_backward(call, *grad_out, *gradients); }));
  }
}

}  // namespace
}  // namespace headway::test
