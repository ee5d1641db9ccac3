// Spans on the CUDA engine: lists of tiles longer than a word of bits, spans in device memory that no host has seen,
// and graphs. spans_test.cpp and the sweep have what every engine promises.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "attention/cuda_engine.h"
#include "attention/cuda_memory.h"
#include "headway/analysis.h"
#include "support/inputs.h"
#include "support/run.h"

namespace headway::test {
namespace {

class CudaSpans : public CudaEngine {};

// [heads, rows, count, 2]; span(h, i, n) as {begin, end}, cut to the keys unless it is said not to.
template <class SpanOf>
Tensor spans_of(std::int64_t heads, std::int64_t rows, std::int64_t count, std::int64_t keys, DType type,
                const SpanOf& span) {
  Tensor spans({1, heads, rows, count, 2}, type);
  each_index({heads, rows, count}, [&](const Dims& at) {
    const std::pair<std::int64_t, std::int64_t> one = span(at[0], at[1], at[2]);
    const std::int64_t begin = keys < 0 ? one.first : std::clamp<std::int64_t>(one.first, 0, keys);
    const std::int64_t end = keys < 0 ? one.second : std::clamp<std::int64_t>(one.second, begin, keys);
    set(spans, {0, at[0], at[1], at[2], 0}, static_cast<double>(begin));
    set(spans, {0, at[0], at[1], at[2], 1}, static_cast<double>(end));
  });
  return spans;
}

AttentionOptions on_cuda(AttentionOptions options) {
  options.engine = Engine::cuda;
  return options;
}

const std::vector<DType> span_types{DType::i32, DType::i64};  // host and device memory: see run.h

// A bit for 64 keys, and a word for 4096 of them.
TEST_F(CudaSpans, over_many_words_of_keys_keep_the_contract) {
  for (DType type : float_types)
    for (DType spans_type : span_types) {
      SCOPED_TRACE(std::string(name(type)) + " spans " + name(spans_type));
      const Inputs inputs = random_inputs(
          {.batch = 1, .heads = 2, .kv_heads = 1, .queries = 70, .keys = 9000, .head_dim = 8, .value_dim = 8}, type);
      const Tensor spans = spans_of(2, 70, 3, 9000, spans_type, [](std::int64_t h, std::int64_t i, std::int64_t n) {
        const std::int64_t begin = n == 0 ? 0 : n == 1 ? 4090 + h * 70 + i : 8600 + i * 3;
        return std::pair(begin, begin + (n == 0 ? 3 : 40 + i % 90));
      });
      expect_contract(inputs.call(on_cuda({.spans = spans})));
    }
}

TEST_F(CudaSpans, over_many_words_of_rows_keep_the_contract) {
  for (DType type : float_types) {
    SCOPED_TRACE(name(type));
    const Inputs inputs = random_inputs(
        {.batch = 1, .heads = 2, .kv_heads = 1, .queries = 8500, .keys = 200, .head_dim = 8, .value_dim = 8}, type);
    const Tensor spans = spans_of(1, 8500, 1, 200, DType::i64, [](std::int64_t, std::int64_t i, std::int64_t) {
      const bool late = i > 4200 && i < 8300;  // such tiles of keys are seen by few rows
      return late ? std::pair(i % 60, i % 60 + 3) : std::pair(i / 80, i / 80 + 90);
    });
    expect_contract(inputs.call(on_cuda({.spans = spans})));
  }
}

// What people ask for, at sizes with whole, mixed and skipped tiles, heads that see different keys, every head dim that
// has a kernel of its own.
TEST_F(CudaSpans, of_documents_windows_and_prefixes_keep_the_contract) {
  for (DType type : {DType::bf16, DType::f16, DType::f32, DType::f64})
    for (std::int64_t dim : {64, 128, 256}) {
      if (type != DType::bf16 && dim != (type == DType::f16 ? 128 : 64)) continue;
      SCOPED_TRACE(std::string(name(type)) + " head dim " + std::to_string(dim));
      const std::int64_t rows = 300, keys = 300;
      const Inputs inputs = random_inputs(
          {.batch = 1, .heads = 2, .kv_heads = 1, .queries = rows, .keys = keys, .head_dim = dim, .value_dim = dim},
          type);
      const auto documents = [](std::int64_t h, std::int64_t i, std::int64_t) {
        const std::int64_t length = h == 0 ? 170 : 70;
        return std::pair(i / length * length, i + 1);
      };
      const auto window = [](std::int64_t, std::int64_t i, std::int64_t n) {
        return n == 0 ? std::pair<std::int64_t, std::int64_t>(0, 4) : std::pair(i - 90, i + 1);
      };
      const auto prefix = [](std::int64_t, std::int64_t i, std::int64_t) {
        return std::pair<std::int64_t, std::int64_t>(0, std::max<std::int64_t>(i + 1, 150));
      };
      const auto holes = [](std::int64_t h, std::int64_t i, std::int64_t n) {
        return std::pair(n * 100 + i % 7 * 5 + h, n * 100 + i % 7 * 5 + 40 + i % 11);
      };
      expect_contract(inputs.call(on_cuda({.spans = spans_of(2, rows, 1, keys, DType::i64, documents)})));
      expect_contract(inputs.call(on_cuda({.spans = spans_of(1, rows, 2, keys, DType::i32, window)})));
      expect_contract(inputs.call(on_cuda({.spans = spans_of(1, rows, 1, keys, DType::i64, prefix)})));
      expect_contract(
          inputs.call(on_cuda({.causal = Causal::top_left, .spans = spans_of(2, rows, 3, keys, DType::i64, holes)})));
    }
}

TEST_F(CudaSpans, of_packed_sequences_keep_the_contract) {
  const Packing packing{{0, 70, 70, 333, 600}, {0, 200, 210, 400, 900}};
  for (DType type : {DType::bf16, DType::f32})
    for (std::int64_t dim : {32, 128})
      for (DType spans_type : span_types) {
        SCOPED_TRACE(std::string(name(type)) + " " + std::to_string(dim) + " spans " + name(spans_type));
        Random random(3);
        const Tensor q = normal({600, 4, dim}, type, random), k = normal({900, 2, dim}, type, random);
        const Tensor v = normal({900, 2, dim}, type, random);
        Tensor spans = spans_of(4, 600, 2, 900, spans_type, [&](std::int64_t h, std::int64_t i, std::int64_t n) {
          std::size_t b = 0;
          while (packing.starts_q[b + 1] <= i) ++b;
          const std::int64_t own = packing.starts_k[b + 1] - packing.starts_k[b];
          const std::int64_t begin = std::min((n * 97 + i * 3 + h * 11) % own, own);
          return std::pair(begin, std::min(begin + 50 + i % 40, own));
        });
        expect_contract({.q = q, .k = k, .v = v, .options = on_cuda({.spans = spans}), .packing = packing});
      }
}

// Of device memory the host knows nothing: what is outside of the keys is cut, and order does not matter.
TEST_F(CudaSpans, of_device_memory_are_cut_to_the_keys) {
  constexpr std::int64_t rows = 150, keys = 300, far = std::int64_t{1} << 40;
  for (DType type : {DType::f32, DType::bf16}) {
    SCOPED_TRACE(name(type));
    const Inputs inputs = random_inputs(
        {.batch = 1, .heads = 1, .kv_heads = 1, .queries = rows, .keys = keys, .head_dim = 64, .value_dim = 64}, type);
    const auto wild = [](std::int64_t, std::int64_t i, std::int64_t n) -> std::pair<std::int64_t, std::int64_t> {
      switch (n) {
        case 0: return {200 + i % 50, far + i};
        case 1: return {-far, 5 + i % 3};
        case 2: return {90, 40};  // begins past its end: empty
        default: return {i % 100, i % 100 + 20};
      }
    };
    const Tensor given = spans_of(1, rows, 4, -1, DType::i64, wild);
    const Tensor legal = spans_of(1, rows, 4, keys, DType::i32, wild);
    const Memory q = copied(inputs.q), k = copied(inputs.k), v = copied(inputs.v), spans = copied(given),
                 out = copied(inputs.q);
    attention(q.view(type, inputs.q.sizes()), k.view(type, inputs.k.sizes()), v.view(type, inputs.v.sizes()),
              out.view(type, inputs.q.sizes()),
              {.spans = spans.view(DType::i64, given.sizes()), .engine = Engine::cuda});
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const Call same = inputs.call(on_cuda({.spans = legal}));
    EXPECT_TRUE(same_bits(fetched(out, inputs.q.sizes(), type), same.run().out));
    expect_contract(same);
  }
}

// More spans than go along as parameters of a few kernels; the host's copy of them changes before the graph runs.
TEST_F(CudaSpans, of_a_captured_call_are_kept) {
  constexpr std::int64_t rows = 6000, keys = 500, dim = 64;
  const Inputs inputs = random_inputs(
      {.batch = 1, .heads = 1, .kv_heads = 1, .queries = rows, .keys = keys, .head_dim = dim, .value_dim = dim},
      DType::bf16);
  const auto span = [](std::int64_t, std::int64_t i, std::int64_t n) {
    return std::pair(n * 200 + i % 90, n * 200 + i % 90 + 60);
  };
  for (DType spans_type : span_types) {
    SCOPED_TRACE(name(spans_type));
    Tensor spans = spans_of(1, rows, 2, keys, spans_type, span);
    const Tensor expected = inputs.call(on_cuda({.spans = spans})).run().out;
    const Memory q = copied(inputs.q), k = copied(inputs.k), v = copied(inputs.v), out = copied(inputs.q),
                 on_device = copied(spans);
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    const ConstTensorView given =
        spans_type == DType::i64 ? on_device.view(spans_type, spans.sizes()) : ConstTensorView(spans);
    attention(q.view(DType::bf16, inputs.q.sizes()), k.view(DType::bf16, inputs.k.sizes()),
              v.view(DType::bf16, inputs.v.sizes()), out.view(DType::bf16, inputs.q.sizes()),
              {.spans = given, .engine = Engine::cuda, .stream = stream});
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    each_index(spans.sizes(), [&](const Dims& at) { set(spans, at, 0); });
    for (int replay = 0; replay < 3; ++replay) {
      ASSERT_EQ(cudaMemset(out.get(), 0xFF, static_cast<std::size_t>(rows * dim * 2)), cudaSuccess);
      ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      EXPECT_TRUE(same_bits(fetched(out, inputs.q.sizes(), DType::bf16), expected));
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

TEST_F(CudaSpans, of_an_analysis_are_heeded) {
  for (DType type : {DType::f32, DType::bf16, DType::f64}) {
    SCOPED_TRACE(name(type));
    const Inputs inputs =
        random_inputs({.batch = 1, .heads = 2, .kv_heads = 1, .queries = 200, .keys = 300, .head_dim = 32}, type);
    const Tensor spans = spans_of(2, 200, 2, 300, DType::i64, [](std::int64_t h, std::int64_t i, std::int64_t n) {
      return std::pair(n * 130 + i % 60 + h, n * 130 + i % 60 + 70);
    });
    const AttentionOptions options = on_cuda({.spans = spans});
    const Results results = inputs.call(options).run(true);
    const Tensor part = run_weights_in(inputs.q, inputs.k, {37, 165, 29, 251}, options);
    const double bound = type == DType::bf16 ? 0.01 : 1e-6;
    EXPECT_TRUE(within(part, read(results.weights->view().slice(2, 37, 165).slice(3, 29, 251)),
                       read(filled({1, 2, 128, 222}, DType::f64, bound))));
  }
}

}  // namespace
}  // namespace headway::test
