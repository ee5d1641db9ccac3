// The CUDA engine beside other libraries: the caller's stream, graphs replayed after the host's memory is freed, and
// errors that other libraries left in the CUDA runtime.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "attention/cuda_engine.h"
#include "attention/cuda_memory.h"
#include "support/inputs.h"

namespace headway::test {
namespace {

class CudaGraph : public CudaEngine {
 protected:
  void SetUp() override {
    CudaEngine::SetUp();
    if (IsSkipped()) return;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override {
    if (stream != nullptr) cudaStreamDestroy(stream);
  }

  // Captures what the action queues on the stream; expect(replay) after each of three replays.
  template <class Action, class Expect>
  void capture_and_replay(const Action& action, const Expect& expect) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    action();
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    for (int replay = 0; replay < 3; ++replay) {
      ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      expect(replay);
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
  }

  cudaStream_t stream = nullptr;
};

TEST_F(CudaGraph, of_a_forward_repeats_what_the_call_gave) {
  const Inputs inputs = random_inputs({.batch = 2, .queries = 3, .keys = 700}, DType::f16);
  const Tensor lens = Tensor::of<std::int64_t>({2}, {500, 700});
  const AttentionOptions plain{.valid_lens = lens, .engine = Engine::cuda};
  const Results expected = inputs.call(plain).run();
  const Memory q = copied(inputs.q), k = copied(inputs.k), v = copied(inputs.v);
  const Dims out_sizes{2, 4, 3, 6};
  const std::size_t out_bytes = 2 * 4 * 3 * 6 * 2;
  const Memory out(out_bytes);
  const auto call = [&] {
    AttentionOptions options = plain;
    options.stream = stream;
    attention(q.view(DType::f16, inputs.q.sizes()), k.view(DType::f16, inputs.k.sizes()),
              v.view(DType::f16, inputs.v.sizes()), out.view(DType::f16, out_sizes), options);
  };
  call();
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_TRUE(same_bits(fetched(out, out_sizes, DType::f16), expected.out));
  ASSERT_EQ(cudaMemset(out.get(), 0xFF, out_bytes), cudaSuccess);
  capture_and_replay(call, [&](int) {
    EXPECT_TRUE(same_bits(fetched(out, out_sizes, DType::f16), expected.out));
    ASSERT_EQ(cudaMemset(out.get(), 0xFF, out_bytes), cudaSuccess);
  });
}

// More lengths than go along as parameters of a few kernels; the host's copy of them is gone when the graph runs.
TEST_F(CudaGraph, keeps_host_lengths_of_every_row) {
  const std::int64_t batch = 8, rows = 1024, keys = 96, dim = 16;
  const Inputs inputs = random_inputs(
      {.batch = batch, .heads = 1, .kv_heads = 1, .queries = rows, .keys = keys, .head_dim = dim, .value_dim = dim},
      DType::bf16);
  Tensor lens({batch, rows}, DType::i64);
  for (std::int64_t n = 0; n < batch * rows; ++n)
    set(lens, {n / rows, n % rows}, static_cast<double>(1 + n * 37 % keys));
  const Memory q = copied(inputs.q), k = copied(inputs.k), v = copied(inputs.v), out = copied(inputs.q);
  const auto call = [&](const Tensor& lengths) {
    const AttentionOptions options{.valid_lens = lengths, .engine = Engine::cuda, .stream = stream};
    attention(q.view(DType::bf16, inputs.q.sizes()), k.view(DType::bf16, inputs.k.sizes()),
              v.view(DType::bf16, inputs.v.sizes()), out.view(DType::bf16, inputs.q.sizes()), options);
  };
  call(lens);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  const Tensor expected = fetched(out, inputs.q.sizes(), DType::bf16);
  std::vector<std::vector<std::int64_t>> junk;
  capture_and_replay(
      [&] {
        call(lens);
        for (int n = 0; n < 64; ++n) junk.emplace_back(static_cast<std::size_t>(batch * rows), 3);
      },
      [&](int) {
        EXPECT_TRUE(same_bits(fetched(out, inputs.q.sizes(), DType::bf16), expected));
        ASSERT_EQ(cudaMemset(out.get(), 0xFF, static_cast<std::size_t>(batch * rows * dim * 2)), cudaSuccess);
      });
}

TEST_F(CudaGraph, of_a_backward_repeats_what_the_call_gave) {
  for (const auto& [dtype, dim] : std::vector<std::pair<DType, std::int64_t>>{
           {DType::bf16, 64}, {DType::f16, 128}, {DType::bf16, 256}, {DType::f32, 64}}) {
    SCOPED_TRACE(std::string(name(dtype)) + " " + std::to_string(dim));
    const Shape shape{
        .batch = 2, .heads = 2, .kv_heads = 1, .queries = 150, .keys = 300, .head_dim = dim, .value_dim = dim};
    const Inputs inputs = random_inputs(shape, dtype);
    const Tensor lens = Tensor::of<std::int32_t>({2}, {250, 300});
    const AttentionOptions plain{.causal = Causal::bottom_right, .valid_lens = lens, .engine = Engine::cuda};
    const Call reference = inputs.call(plain);
    Random random(2);
    const Tensor grad = normal(reference.out_sizes(), dtype, random);
    const Results results = reference.run();
    const GradientTensors expected = reference.gradients(grad, results);
    const Memory q = copied(inputs.q), k = copied(inputs.k), v = copied(inputs.v), grad_out = copied(grad),
                 out = copied(results.out), lse = copied(results.lse);
    const Memory dq = copied(inputs.q), dk = copied(inputs.k), dv = copied(inputs.v);
    const auto view = [&, type = dtype](const Memory& memory, const Tensor& like) {
      return memory.view(type, like.sizes());
    };
    capture_and_replay(
        [&] {
          AttentionOptions options = plain;
          options.stream = stream;
          attention_backward(view(grad_out, grad), view(q, inputs.q), view(k, inputs.k), view(v, inputs.v),
                             view(out, results.out), lse.view(DType::f32, results.lse.sizes()),
                             {.dq = view(dq, inputs.q), .dk = view(dk, inputs.k), .dv = view(dv, inputs.v)}, options);
        },
        [&](int) {
          const auto expect_bits = [&, type = dtype](const Memory& memory, const Tensor& bits) {
            EXPECT_TRUE(same_bits(fetched(memory, bits.sizes(), type), bits));
            const std::size_t bytes = static_cast<std::size_t>(bits.elements()) * size_of(type);
            ASSERT_EQ(cudaMemset(memory.get(), 0xFF, bytes), cudaSuccess);
          };
          expect_bits(dq, expected.dq);
          expect_bits(dk, expected.dk);
          expect_bits(dv, expected.dv);
        });
  }
}

// An allocation that fails leaves an error behind, as a library that does not look would.
TEST_F(CudaEngine, neither_reports_nor_takes_away_an_error_that_another_library_left) {
  const Inputs inputs = random_inputs({.batch = 2, .queries = 3, .keys = 70}, DType::f32);
  const Tensor lens = Tensor::of<std::int32_t>({2}, {50, 70});
  const Memory q = copied(inputs.q), k = copied(inputs.k), v = copied(inputs.v);
  const Dims out_sizes{2, 4, 3, 6};
  const Memory out(2 * 4 * 3 * 6 * 4), lse(2 * 4 * 3 * 4), dq = copied(inputs.q),
                                                           sinks = copied(filled({4}, DType::f32, 0.5)), dsinks(4 * 4);
  const auto view = [](const Memory& memory, const Dims& sizes) { return memory.view(DType::f32, sizes); };
  const TensorView query = view(q, inputs.q.sizes()), key = view(k, inputs.k.sizes()),
                   value = view(v, inputs.v.sizes());
  const AttentionOptions options{.valid_lens = lens, .sinks = view(sinks, {4}), .engine = Engine::cuda};
  const auto call = [&] {
    attention(query, key, value, view(out, out_sizes), options, {.lse = view(lse, {2, 4, 3})});
    attention_backward(view(out, out_sizes), query, key, value, view(out, out_sizes), view(lse, {2, 4, 3}),
                       {.dq = view(dq, inputs.q.sizes()), .dsinks = view(dsinks, {4})}, options);
    copy(query.transpose(1, 2), view(dq, {2, 3, 4, 8}));
  };
  call();  // what is done once in a process is done
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, std::size_t{1} << 60), cudaErrorMemoryAllocation);
  ASSERT_EQ(cudaPeekAtLastError(), cudaErrorMemoryAllocation);
  EXPECT_NO_THROW(call());
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

}  // namespace
}  // namespace headway::test
