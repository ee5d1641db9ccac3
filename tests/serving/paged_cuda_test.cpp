// Pages on a GPU: tables and lengths that nobody checked, graphs that keep those of the host, the kernels that were
// made for pages at the sizes that decide between them.
#include <gtest/gtest.h>

#include <cmath>

#include "attention/cuda_engine.h"
#include "attention/cuda_memory.h"
#include "serving/paged.h"
#include "support/run.h"

namespace headway::test {
namespace {

class PagedCuda : public CudaEngine {
 protected:
  static AttentionOptions options(AttentionOptions options = {}) {
    options.causal = Causal::bottom_right;
    options.engine = Engine::cuda;
    return options;
  }

  struct Output {
    Tensor out, lse;
  };

  static Output run(const PagedInputs& inputs, ConstTensorView query, const AttentionOptions& options) {
    Output output{filled({query.size(0), query.size(1), query.size(2), inputs.shape.value_dim}, query.dtype(), NAN),
                  filled({query.size(0), query.size(1), query.size(2)}, DType::f32, NAN)};
    run_attention_paged(query, {}, inputs.keys(), output.out, options, {.lse = output.lse});
    return output;
  }

  // Bits of invariant calls are those of the gathered rows; the others are within the oracle's bounds.
  static void expect_gathered(const PagedShape& shape, std::int64_t heads, std::int64_t queries,
                              const AttentionOptions& options) {
    SCOPED_TRACE(testing::Message() << "pages of " << shape.page_size << ", " << shape.type << ", head dim "
                                    << shape.head_dim << ", " << queries << " queries, " << heads << "/"
                                    << shape.kv_heads << " heads");
    const PagedInputs inputs(shape);
    Random random(7);
    const auto batch = static_cast<std::int64_t>(shape.lengths.size());
    const Tensor query = normal({batch, heads, queries, shape.head_dim}, shape.type, random);
    const Output usual = run(inputs, query, options);
    AttentionOptions invariant = options;
    invariant.batch_invariant = true;
    const Output same = run(inputs, query, invariant);
    for (std::int64_t b = 0; b < batch; ++b) {
      SCOPED_TRACE(testing::Message() << "sequence " << b);
      const auto of = [&](const Tensor& tensor) { return ConstTensorView(tensor).slice(0, b, b + 1); };
      const Call call = gathered_call(inputs, b, of(query), invariant);
      const Results results = call.run();
      EXPECT_TRUE(same_bits(of(same.out), results.out)) << "out";
      EXPECT_TRUE(same_bits(of(same.lse), results.lse)) << "lse";
      const auto expect_exact = [&](const Output& output) {
        const ConstTensorView lse = of(output.lse);
        expect_forward(call, of(output.out),
                       {.lse = TensorView(const_cast<void*>(lse.data()), lse.dtype(), lse.sizes(), lse.strides())});
      };
      expect_exact(usual);
      expect_exact(same);
    }
  }
};

TEST_F(PagedCuda, decoding_reads_pages_of_any_size) {
  for (const DType type : {DType::bf16, DType::f16})
    for (const std::int64_t page_size : {1, 3, 8, 16, 24, 64, 256})
      for (const std::int64_t head_dim : {64, 80, 128, 256})
        expect_gathered({.lengths = {2100, 1, 65, 0, 700},
                         .page_size = page_size,
                         .head_dim = head_dim,
                         .value_dim = head_dim,
                         .type = type,
                         .table_type = page_size % 2 == 0 ? DType::i64 : DType::i32},
                        8, 1, options());
}

TEST_F(PagedCuda, chunks_of_prompts_do_too) {
  for (const DType type : {DType::bf16, DType::f16, DType::f32})
    for (const std::int64_t page_size : {1, 3, 16, 48, 64, 256})
      for (const std::int64_t head_dim : {64, 128, 256})
        expect_gathered({.lengths = {900, 130},
                         .page_size = page_size,
                         .head_dim = head_dim,
                         .value_dim = head_dim,
                         .type = type,
                         .table_type = page_size % 2 == 0 ? DType::i64 : DType::i32},
                        4, 150, options());
}

TEST_F(PagedCuda, options_of_attention_apply_to_decoding_and_to_chunks) {
  const Tensor slopes = Tensor::of<float>({4}, {0.5F, 0.25F, 0.125F, 0.0625F});
  const Tensor sinks = Tensor::of<float>({4}, {0.5F, -1.0F, 3.0F, 0.0F});
  const std::vector<AttentionOptions> kinds = {
      options({.window = Window{300, 0}}), options({.scale = 0.3, .softcap = 2.0}), options({.alibi_slopes = slopes}),
      options({.sinks = sinks}), options({.window = Window{100, 0}, .softcap = 5.0, .sinks = sinks})};
  for (const AttentionOptions& kind : kinds)
    for (const std::int64_t queries : {1, 4, 140})
      for (const std::int64_t page_size : {3, 16})
        expect_gathered({.lengths = {1400, 18, 300},
                         .page_size = page_size,
                         .head_dim = 128,
                         .value_dim = 128,
                         .type = DType::bf16},
                        4, queries, kind);
  AttentionOptions all_keys = options();
  all_keys.causal = Causal::none;
  for (const std::int64_t queries : {1, 140})
    expect_gathered({.lengths = {1400, 18, 0}, .head_dim = 128, .value_dim = 128, .type = DType::bf16}, 4, queries,
                    all_keys);
}

TEST_F(PagedCuda, decoding_over_8_bit_pages_is_attention_over_the_rows_as_floats) {
  for (const DType type : {DType::i8, DType::f8e4m3})
    for (const DType query_type : {DType::bf16, DType::f16})
      for (const std::int64_t page_size : {1, 3, 16, 64})
        for (const std::int64_t head_dim : {64, 80, 128, 256}) {
          SCOPED_TRACE(testing::Message()
                       << type << " beside " << query_type << ", pages of " << page_size << ", head dim " << head_dim);
          const PagedInputs inputs({.lengths = {2100, 1, 65, 0, 700},
                                    .page_size = page_size,
                                    .head_dim = head_dim,
                                    .value_dim = head_dim,
                                    .type = type,
                                    .table_type = page_size % 2 == 0 ? DType::i64 : DType::i32});
          Random random(7);
          const Tensor query = normal({5, 8, 1, head_dim}, query_type, random);
          AttentionOptions kind = options();
          if (page_size == 16) kind.window = Window{900, 0};
          if (page_size == 3) kind.softcap = 3.0;
          const Output usual = run(inputs, query, kind);
          kind.batch_invariant = true;
          const Output same = run(inputs, query, kind);
          for (std::int64_t b = 0; b < 5; ++b) {
            SCOPED_TRACE(testing::Message() << "sequence " << b);
            const auto of = [&](const Tensor& tensor) { return ConstTensorView(tensor).slice(0, b, b + 1); };
            const Tensor floats = convert(of(query), DType::f32);
            const Forward exact = forward(gathered_call(inputs, b, floats, kind).spec());
            for (const Output* found : {&usual, &same}) {
              const Output& output = *found;
              EXPECT_TRUE(within(of(output.out), exact.out.value, error_bound(exact.out, Kind::out, query_type)));
              EXPECT_TRUE(within(of(output.lse), exact.lse.value, error_bound(exact.lse, Kind::lse, query_type)));
            }
            PagedKeys alone = inputs.keys();
            alone.block_table = alone.block_table.slice(0, b, b + 1);
            alone.lengths = alone.lengths.slice(0, b, b + 1);
            Tensor out = filled({1, 8, 1, head_dim}, query_type, NAN);
            run_attention_paged(of(query), {}, alone, out, kind);
            EXPECT_TRUE(same_bits(out, of(same.out))) << "alone";
          }
        }
}

TEST_F(PagedCuda, scales_and_elements_that_are_not_finite_show_where_they_belong) {
  for (const std::int64_t length : {200, 3000}) {
    PagedInputs inputs({.lengths = {length, 100}, .head_dim = 64, .value_dim = 64, .type = DType::f8e4m3});
    const auto page = static_cast<std::int64_t>(get(inputs.table, {0, 2}));
    set(inputs.value_pages.view(), {page, 3, 0, 5}, NAN);
    set(inputs.value_scales, {page, 4, 1}, INFINITY);
    Random random(7);
    const Tensor query = normal({2, 4, 1, 64}, DType::bf16, random);
    const Tensor out = run(inputs, query, options()).out;
    EXPECT_TRUE(std::isnan(get(out, {0, 0, 0, 5})));
    EXPECT_FALSE(std::isnan(get(out, {0, 0, 0, 4})));
    EXPECT_FALSE(std::isfinite(get(out, {0, 2, 0, 1})));
    for (std::int64_t h = 0; h < 4; ++h) EXPECT_TRUE(std::isfinite(get(out, {1, h, 0, 5})));
    const Tensor windowed = run(inputs, query, options({.window = Window{100, 0}})).out;
    for (const Real value : read(windowed).values) EXPECT_TRUE(std::isfinite(value));
  }
}

TEST_F(PagedCuda, a_table_and_lengths_out_of_range_on_the_device_are_cut) {
  for (const DType type : {DType::bf16, DType::f32, DType::i8})
    for (const std::int64_t queries : {1, 100}) {
      const PagedShape shape{
          .lengths = {300, 200, 64, 90}, .head_dim = 64, .value_dim = 64, .type = type, .table_type = DType::i64};
      PagedInputs inputs(shape), cut(shape);
      const auto pages = inputs.key_pages.view().size(0);
      Random random(5);
      const Tensor query = normal({4, 4, queries, 64}, type == DType::bf16 ? type : DType::f32, random);
      set(inputs.table, {0, 1}, -7), set(cut.table, {0, 1}, 0);
      set(inputs.table, {0, 2}, 1e9), set(cut.table, {0, 2}, static_cast<double>(pages - 1));
      set(inputs.table, {1, 0}, static_cast<double>(pages)), set(cut.table, {1, 0}, static_cast<double>(pages - 1));
      set(inputs.lengths, {2}, -5), set(cut.lengths, {2}, 0);
      const std::int64_t most = inputs.table.size(1) * 16;
      set(inputs.lengths, {3}, 1e12), set(cut.lengths, {3}, static_cast<double>(most));
      for (std::int64_t n = 0; n < inputs.table.size(1); ++n)
        set(inputs.table, {3, n}, 1), set(cut.table, {3, n}, 1);  // the same page again and again
      const Output expected = run(cut, query, options()), output = run(inputs, query, options());
      EXPECT_TRUE(same_bits(output.out, expected.out)) << type << " " << queries;
      EXPECT_TRUE(same_bits(output.lse, expected.lse)) << type << " " << queries;
      for (std::int64_t h = 0; h < 4; ++h) EXPECT_EQ(get(output.out, {2, h, 0, 0}), 0);
    }
}

TEST_F(PagedCuda, lengths_on_the_host_are_checked_though_the_table_is_not) {
  const PagedInputs inputs({.lengths = {40}, .type = DType::bf16, .table_type = DType::i64});
  PagedKeys keys = inputs.keys();
  const Tensor too_long = Tensor::of<std::int32_t>({1}, {1 << 20});
  keys.lengths = too_long;
  Random random(5);
  const Tensor query = normal({1, 2, 1, 24}, DType::bf16, random);
  Tensor out({1, 2, 1, 20}, DType::bf16);
  EXPECT_TRUE((throws<InvalidArgument>("attention_paged", {"lengths[0] is 1048576"},
                                       [&] { run_attention_paged(query, {}, keys, out, options()); })));
}

TEST_F(PagedCuda, a_graph_keeps_the_table_and_lengths_of_the_host) {
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  PagedInputs inputs({.lengths = {9000, 300}, .page_size = 1, .head_dim = 64, .value_dim = 64, .type = DType::bf16});
  Random random(5);
  const Tensor query = normal({2, 4, 1, 64}, DType::bf16, random);
  const Tensor expected = run(inputs, query, options()).out;
  const auto pages = inputs.key_pages.view().sizes();
  const Memory q = copied(query), k = copied(convert(inputs.key_pages.view(), DType::bf16)),
               v = copied(convert(inputs.value_pages.view(), DType::bf16));
  const Memory out(2 * 4 * 64 * 2);
  AttentionOptions captured = options();
  captured.stream = stream;
  const auto call = [&] {
    attention_paged(q.view(DType::bf16, query.sizes()),
                    {.key_pages = k.view(DType::bf16, pages),
                     .value_pages = v.view(DType::bf16, pages),
                     .block_table = inputs.table,
                     .lengths = inputs.lengths},
                    out.view(DType::bf16, {2, 4, 1, 64}), captured);
  };
  call();
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  call();
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (std::int64_t n = 0; n < inputs.table.size(1); ++n) set(inputs.table, {0, n}, 0);
  for (int replay = 0; replay < 2; ++replay) {
    ASSERT_EQ(cudaMemset(out.get(), 0xFF, 2 * 4 * 64 * 2), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_TRUE(same_bits(fetched(out, {2, 4, 1, 64}, DType::bf16), expected));
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_F(PagedCuda, the_plan_names_the_kernel) {
  const Memory q(1 << 12), pages(1 << 16);
  const Tensor table({1, 1}, DType::i32), lengths({1}, DType::i32);
  const ConstTensorView view = pages.view(DType::bf16, {8, 16, 2, 128});
  const PagedKeys keys{.key_pages = view, .value_pages = view, .block_table = table, .lengths = lengths};
  const Plan plan = explain_paged(q.view(DType::bf16, {1, 4, 1, 128}), keys, options());
  EXPECT_EQ(plan.engine, Engine::cuda);
  EXPECT_NE(plan.kernel.find("decode"), std::string::npos) << plan.kernel;
}

}  // namespace
}  // namespace headway::test
