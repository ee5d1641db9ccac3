// Attention over pages: what attention gives on the gathered rows, bit for bit, and within the oracle's bounds,
// whatever the pages, the table and the rest of the batch look like.
#include "serving/paged.h"

#include <gtest/gtest.h>

#include <cmath>

#include "headway/threads.h"
#include "support/run.h"

namespace headway::test {
namespace {

class Paged : public EngineTest {
 protected:
  ~Paged() override { set_threads(threads_before_); }

  static AttentionOptions causal(AttentionOptions options = {}) {
    options.causal = Causal::bottom_right;
    return options;
  }

  // On a GPU bits are the same for invariant calls.
  AttentionOptions here(AttentionOptions options) const {
    options.batch_invariant = GetParam() == Engine::cuda;
    return on_engine(options);
  }

  static Tensor run_paged(ConstTensorView query, const PagedKeys& keys, const AttentionOptions& options) {
    Dims sizes = query.sizes();
    sizes[sizes.size() - 1] = keys.value_pages.size(3);
    Tensor out = filled(sizes, query.dtype(), NAN);
    run_attention_paged(query, {}, keys, out, options);
    return out;
  }

  // Runs a batch of `queries` rows for each sequence, and every sequence alone over its gathered rows.
  void expect_gathered(const PagedShape& shape, std::int64_t heads, std::int64_t queries,
                       const AttentionOptions& options = causal(), DType query_type = DType::f32) {
    expect_gathered(PagedInputs(shape), heads, queries, options, query_type);
  }

  void expect_gathered(const PagedInputs& inputs, std::int64_t heads, std::int64_t queries, AttentionOptions options,
                       DType query_type) {
    const PagedShape& shape = inputs.shape;
    SCOPED_TRACE(testing::Message() << "pages of " << shape.page_size << ", " << shape.type << " pages, " << query_type
                                    << " queries, " << queries << " of them");
    const auto batch = static_cast<std::int64_t>(shape.lengths.size());
    Random random(7);
    const Tensor query = normal({batch, heads, queries, shape.head_dim}, query_type, random);
    options = here(options);
    Tensor out = filled({batch, heads, queries, shape.value_dim}, query_type, NAN);
    Tensor lse = filled({batch, heads, queries}, query_type == DType::f64 ? DType::f64 : DType::f32, NAN);
    run_attention_paged(query, {}, inputs.keys(), out, options, {.lse = lse});
    for (std::int64_t b = 0; b < batch; ++b) {
      SCOPED_TRACE(testing::Message() << "sequence " << b << " of " << shape.lengths[static_cast<std::size_t>(b)]);
      expect_sequence(inputs, b, ConstTensorView(query).slice(0, b, b + 1), ConstTensorView(out).slice(0, b, b + 1),
                      ConstTensorView(lse).slice(0, b, b + 1), options);
    }
    EXPECT_TRUE(inputs.key_pages.surroundings_intact());
    EXPECT_TRUE(inputs.value_pages.surroundings_intact());
  }

  // The same 8-bit pages cut into smaller ones, of which `table` lists those of each sequence.
  static PagedKeys in_pages_of(const PagedInputs& inputs, std::int64_t size, Tensor& table) {
    PagedKeys keys = inputs.keys();
    const std::int64_t parts = inputs.shape.page_size / size, pages = keys.key_pages.size(0);
    table = Tensor({inputs.table.size(0), inputs.table.size(1) * parts}, DType::i32);
    each_index(table.sizes(), [&](const Dims& at) {
      const double page = get(inputs.table, {at[0], at[1] / parts});
      const bool used = page >= 0 && page < static_cast<double>(pages);
      set(table, at, used ? page * static_cast<double>(parts) + static_cast<double>(at[1] % parts) : -1);
    });
    const auto cut = [&](ConstTensorView view) {
      Dims sizes = view.sizes();
      sizes[0] *= parts;
      sizes[1] = size;
      return ConstTensorView(view.data(), view.dtype(), sizes);
    };
    keys.key_pages = cut(keys.key_pages);
    keys.value_pages = cut(keys.value_pages);
    keys.key_scales = cut(*keys.key_scales);
    keys.value_scales = cut(*keys.value_scales);
    keys.block_table = table;
    return keys;
  }

  // The same numbers, laid out otherwise.
  static Strided relaid(ConstTensorView view, Layout layout) {
    Strided result(view.sizes(), view.dtype(), layout);
    each_index(view.sizes(), [&](const Dims& at) { set(result.view(), at, get(view, at)); });
    return result;
  }

  // 8-bit rows on a GPU, or beside bf16 queries: what attention over the rows as floats gives, within section 3's
  // bounds for the query's type.
  static void expect_near_floats(const Call& call, ConstTensorView out, ConstTensorView lse) {
    const Forward exact = forward(call.spec());
    EXPECT_TRUE(within(out, exact.out.value, error_bound(exact.out, Kind::out, out.dtype()))) << "out";
    EXPECT_TRUE(within(lse, exact.lse.value, error_bound(exact.lse, Kind::lse, out.dtype()))) << "lse";
  }

  // A GPU has other kernels for packed queries: the bits are those of packed gathered rows. query, out [Sq,H,..].
  static void expect_packed_sequence(const PagedInputs& inputs, std::int64_t b, ConstTensorView query,
                                     ConstTensorView out, const AttentionOptions& options) {
    const auto packed = [&](const std::vector<Tensor>& rows) {
      return ConstTensorView(rows[static_cast<std::size_t>(b)]).select(0, 0).transpose(0, 1);
    };
    const ConstTensorView keys = packed(inputs.gathered_keys), values = packed(inputs.gathered_values);
    const Call call{query, keys, values, options, Packing{{0, query.size(0)}, {0, keys.size(0)}}};
    EXPECT_TRUE(same_bits(out, call.run().out));
    expect_forward(call, out);
  }

  // query, out [1,H,Sq,..], lse [1,H,Sq] of one sequence.
  static void expect_sequence(const PagedInputs& inputs, std::int64_t b, ConstTensorView query, ConstTensorView out,
                              ConstTensorView lse, const AttentionOptions& options) {
    const bool scaled = is_8bit(inputs.shape.type);
    const Tensor as_floats = convert(query, scaled ? DType::f32 : query.dtype());
    const Call call = gathered_call(inputs, b, as_floats, options);
    if (scaled && (options.engine == Engine::cuda || (options.engine == Engine::cpu && query.dtype() == DType::bf16))) {
      expect_near_floats(call, out, lse);
      return;
    }
    const Results results = call.run();
    const Tensor expected = convert(results.out, out.dtype());
    if (options.engine == Engine::reference && out.dtype() != results.out.dtype()) {
      // It sums in float64 and rounds that once; by way of float32 it may be the neighbouring number.
      Array bound = read(expected);
      for (Real& value : bound.values) value = std::fabs(value) * 0x1p-7L;
      EXPECT_TRUE(within(out, read(expected), bound));
    } else {
      EXPECT_TRUE(same_bits(out, expected));
    }
    EXPECT_TRUE(same_bits(lse, results.lse));
    if (!scaled || query.dtype() == DType::f32) {
      TensorView written(const_cast<void*>(lse.data()), lse.dtype(), lse.sizes(), lse.strides());
      expect_forward(call, out, {.lse = written});
    }
  }

 private:
  int threads_before_ = get_threads();
};

TEST_P(Paged, any_page_size_gives_what_gathered_rows_give) {
  for (const DType type : float_types)
    for (const std::int64_t page_size : {1, 2, 3, 16, 24, 64, 256}) {
      expect_gathered({.lengths = {150, 33, 0, 1, 64, 31}, .page_size = page_size, .type = type}, 4, 1, causal(), type);
      expect_gathered({.lengths = {300, 40, 0, 5}, .page_size = page_size, .type = type}, 4, 20, causal(), type);
    }
}

TEST_P(Paged, several_chunks_and_blocks_of_keys_do_too) {
  for (const DType type : {DType::f32, DType::bf16})
    for (const std::int64_t page_size : {3, 16, 128}) {
      expect_gathered({.lengths = {2600, 700}, .page_size = page_size, .type = type}, 2, 2, causal(), type);
      expect_gathered({.lengths = {1100, 520}, .page_size = page_size, .kv_heads = 1, .type = type}, 2, 70, causal(),
                      type);
    }
}

TEST_P(Paged, eight_bit_pages_give_what_their_rows_read_back_as_floats_give) {
  for (const DType type : {DType::i8, DType::f8e4m3})
    for (const DType query_type : {DType::f32, DType::bf16, DType::f16})
      for (const std::int64_t page_size : {1, 3, 16, 64}) {
        expect_gathered({.lengths = {150, 33, 0, 7}, .page_size = page_size, .type = type}, 4, 1, causal(), query_type);
        expect_gathered({.lengths = {300, 600, 9}, .page_size = page_size, .type = type}, 4, 20, causal(), query_type);
      }
}

TEST_P(Paged, eight_bit_pages_of_other_sizes_and_strides_give_the_same_bits) {
  for (const DType type : {DType::i8, DType::f8e4m3})
    for (const std::int64_t queries : {1, 3}) {
      const PagedInputs inputs(
          {.lengths = {2305, 77, 600}, .page_size = 48, .head_dim = 72, .value_dim = 130, .type = type});
      Random random(3);
      const Tensor query = normal({3, 12, queries, 72}, DType::bf16, random);
      const AttentionOptions options = here(causal({.window = Window{700, 0}}));
      const Tensor expected = run_paged(query, inputs.keys(), options);
      for (const std::int64_t size : {1, 3, 16}) {
        Tensor table;
        EXPECT_TRUE(same_bits(run_paged(query, in_pages_of(inputs, size, table), options), expected)) << size;
      }
      for (const Layout layout : {Layout::heads_inside, Layout::gaps, Layout::misaligned}) {
        PagedKeys keys = inputs.keys();
        const Strided other_keys = relaid(keys.key_pages, layout), other_values = relaid(keys.value_pages, layout);
        keys.key_pages = other_keys.view();
        keys.value_pages = other_values.view();
        EXPECT_TRUE(same_bits(run_paged(query, keys, options), expected)) << name(layout);
      }
      for (std::int64_t b = 0; b < 3; ++b) {
        PagedKeys alone = inputs.keys();
        alone.block_table = alone.block_table.slice(0, b, b + 1);
        alone.lengths = alone.lengths.slice(0, b, b + 1);
        EXPECT_TRUE(same_bits(run_paged(ConstTensorView(query).slice(0, b, b + 1), alone, options),
                              ConstTensorView(expected).slice(0, b, b + 1)));
      }
    }
}

TEST_P(Paged, options_of_attention_apply) {
  const Tensor slopes = Tensor::of<float>({4}, {0.5F, 0.25F, 0.125F, 0.0625F});
  const Tensor sinks = Tensor::of<float>({4}, {0.5F, -1.0F, 3.0F, 0.0F});
  const std::vector<AttentionOptions> kinds = {
      {},
      {.causal = Causal::top_left},
      {.causal = Causal::bottom_right, .window = Window{70, 0}},
      {.window = Window{20, 10}},
      {.causal = Causal::bottom_right, .scale = 0.3, .softcap = 2.0},
      {.causal = Causal::bottom_right, .alibi_slopes = slopes},
      {.causal = Causal::bottom_right, .sinks = sinks},
      {.causal = Causal::bottom_right,
       .window = Window{100, 0},
       .softcap = 5.0,
       .alibi_slopes = slopes,
       .sinks = sinks},
  };
  for (const AttentionOptions& options : kinds)
    for (const DType type : {DType::f32, DType::bf16, DType::i8})
      for (const std::int64_t queries : {1, 3, 40})
        expect_gathered({.lengths = {301, 18, 90}, .page_size = 16, .type = type}, 4, queries, options,
                        type == DType::bf16 ? DType::bf16 : DType::f32);
  for (const AttentionOptions& options : kinds)
    for (const DType type : {DType::i8, DType::f8e4m3})
      for (const std::int64_t queries : {1, 3})
        expect_gathered({.lengths = {301, 18, 90}, .page_size = 16, .type = type}, 4, queries, options, DType::bf16);
}

// Beside bf16 queries weights times scales become bf16 where they suit it; others keep float's range.
TEST_P(Paged, scales_of_any_size_count) {
  if (GetParam() == Engine::cuda) GTEST_SKIP() << "a GPU's weights are f16, of a smaller range: not tried there yet";
  for (const double size : {1e-37, 1e-20, 1e30}) {
    PagedInputs inputs({.lengths = {90, 200}, .page_size = 16, .kv_heads = 1, .type = DType::i8});
    for (Tensor& rows : inputs.gathered_values)
      each_index(rows.sizes(), [&](const Dims& at) { set(rows, at, get(rows, at) * size); });
    each_index(inputs.value_scales.sizes(),
               [&](const Dims& at) { set(inputs.value_scales, at, get(inputs.value_scales, at) * size); });
    Random random(4);
    const Tensor query = normal({2, 2, 1, 24}, DType::bf16, random);
    const Tensor out = run_paged(query, inputs.keys(), here(causal()));
    for (std::int64_t b = 0; b < 2; ++b) {
      const Tensor floats = convert(ConstTensorView(query).slice(0, b, b + 1), DType::f32);
      const Forward exact = forward(gathered_call(inputs, b, floats, here(causal())).spec());
      EXPECT_TRUE(within(ConstTensorView(out).slice(0, b, b + 1), exact.out.value,
                         error_bound(exact.out, Kind::out, DType::bf16)))
          << size;
    }
  }
}

TEST_P(Paged, nan_in_an_eight_bit_key_shows_in_the_rows_that_see_it) {
  for (const bool in_scale : {false, true}) {
    PagedInputs inputs({.lengths = {100, 100}, .type = DType::f8e4m3});
    Random random(5);
    const Tensor query = normal({2, 2, 3, 24}, DType::bf16, random);
    const Tensor before = run_paged(query, inputs.keys(), here(causal()));
    const auto page = static_cast<std::int64_t>(get(inputs.table, {1, 6}));  // the last key, which the last query sees
    if (in_scale) {
      set(inputs.key_scales, {page, 3, 0}, NAN);
      set(inputs.value_scales, {page, 3, 0}, NAN);
    } else {
      set(inputs.key_pages.view(), {page, 3, 0, 5}, NAN);
      set(inputs.value_pages.view(), {page, 3, 0, 0}, NAN);
    }
    const Tensor after = run_paged(query, inputs.keys(), here(causal()));
    const ConstTensorView found(after), expected(before);
    EXPECT_TRUE(same_bits(found.slice(2, 0, 2), expected.slice(2, 0, 2)));
    EXPECT_TRUE(same_bits(found.slice(0, 0, 1), expected.slice(0, 0, 1)));
    EXPECT_TRUE(same_bits(found.slice(1, 1, 2), expected.slice(1, 1, 2)));
    EXPECT_TRUE(std::isnan(get(after, {1, 0, 2, 0})));
  }
}

TEST_P(Paged, heads_may_be_grouped_and_share_one_key_head) {
  for (const std::int64_t kv_heads : {1, 2, 8})
    expect_gathered({.lengths = {130, 60}, .kv_heads = kv_heads, .head_dim = 64, .value_dim = 64}, 8, 1);
}

TEST_P(Paged, sequences_may_share_pages) {
  for (const DType type : {DType::f32, DType::i8})
    expect_gathered({.lengths = {200, 150, 97}, .type = type, .shared_prefix = true}, 4, 2);
}

TEST_P(Paged, pages_may_have_any_strides) {
  for (const Layout layout : {Layout::heads_inside, Layout::gaps, Layout::reversed, Layout::misaligned})
    for (const DType type : {DType::f32, DType::bf16, DType::i8})
      for (const std::int64_t queries : {1, 20})
        expect_gathered({.lengths = {150, 33}, .type = type, .table_type = DType::i64, .layout = layout}, 4, queries,
                        causal(), type == DType::bf16 ? DType::bf16 : DType::f32);
}

TEST_P(Paged, values_may_be_the_first_columns_of_the_keys) {
  for (const DType type : {DType::f32, DType::bf16})
    for (const std::int64_t queries : {1, 12}) {
      const PagedInputs inputs({.lengths = {90, 40}, .kv_heads = 1, .head_dim = 576, .value_dim = 512, .type = type});
      PagedKeys keys = inputs.keys();
      keys.value_pages = keys.key_pages.slice(3, 0, 512);
      Random random(3);
      const Tensor query = normal({2, 16, queries, 576}, type, random);
      const Tensor out = run_paged(query, keys, here(causal()));
      for (std::int64_t b = 0; b < 2; ++b) {
        const ConstTensorView rows = inputs.gathered_keys[static_cast<std::size_t>(b)];
        const Call call{ConstTensorView(query).slice(0, b, b + 1), rows, rows.slice(3, 0, 512), here(causal()), {}};
        EXPECT_TRUE(same_bits(ConstTensorView(out).slice(0, b, b + 1), call.run().out));
        expect_forward(call, ConstTensorView(out).slice(0, b, b + 1));
      }
    }
}

TEST_P(Paged, packed_queries_mix_prefill_and_decode) {
  for (const DType type : {DType::f32, DType::bf16, DType::i8, DType::f8e4m3}) {
    const DType query_type = type == DType::bf16 ? type : DType::f32;
    const PagedInputs inputs({.lengths = {300, 150, 0, 70, 3, 33}, .page_size = 16, .type = type});
    const std::vector<std::int64_t> counts{1, 100, 0, 8, 5, 1};  // the fifth has more queries than keys
    const Tensor bounds = cu_seqlens(counts);
    const std::int64_t total = 115, heads = 4;
    Random random(11);
    const Tensor query = normal({total, heads, 24}, query_type, random);
    Tensor out = filled({total, heads, 20}, query_type, NAN);
    Tensor lse = filled({heads, total}, DType::f32, NAN);
    const AttentionOptions options = here(causal({.window = Window{120, 0}}));
    run_attention_paged(query, bounds, inputs.keys(), out, options, {.lse = lse});
    Tensor again = filled({total, heads, 20}, query_type, NAN);
    run_attention_paged(query, bounds, inputs.keys(), again, options);
    EXPECT_TRUE(same_bits(out, again));
    std::int64_t begin = 0;
    for (std::size_t b = 0; b < counts.size(); begin += counts[b], ++b) {
      const auto rows = [&](ConstTensorView view) {
        return view.slice(0, begin, begin + counts[b]).transpose(0, 1).unsqueeze(0);
      };
      const ConstTensorView lse_rows = ConstTensorView(lse).slice(1, begin, begin + counts[b]).unsqueeze(0);
      if (GetParam() == Engine::cuda && query_type == DType::bf16)
        expect_packed_sequence(inputs, static_cast<std::int64_t>(b),
                               ConstTensorView(query).slice(0, begin, begin + counts[b]),
                               ConstTensorView(out).slice(0, begin, begin + counts[b]), options);
      else
        expect_sequence(inputs, static_cast<std::int64_t>(b), rows(query), rows(out), lse_rows, options);
    }
  }
}

// Where the rows of a token's kv heads lie side by side, kernels may take a few keys of each head in turn; gathered
// rows lie head by head.
TEST_P(Paged, many_heads_give_the_bits_of_each_alone) {
  for (const DType type : {DType::f32, DType::bf16, DType::i8})
    for (const std::int64_t page_size : {1, 5, 16, 48}) {
      const DType query_type = type == DType::i8 ? DType::bf16 : type;
      const PagedInputs inputs({.lengths = {1100, 333, 40},
                                .page_size = page_size,
                                .kv_heads = 11,
                                .head_dim = 40,
                                .value_dim = 72,
                                .type = type});
      for (const int threads : {1, 4}) {
        set_threads(threads);
        expect_gathered(inputs, 22, 1, causal(), query_type);
        expect_gathered(inputs, 11, 3, causal({.window = Window{100, 0}}), query_type);
      }
    }
}

TEST_P(Paged, heads_of_other_sizes_of_queries_change_no_bit_of_their_neighbours) {
  const PagedInputs inputs(
      {.lengths = {300, 70}, .page_size = 16, .kv_heads = 6, .head_dim = 32, .value_dim = 32, .type = DType::bf16});
  Random random(5);
  Tensor query = normal({2, 12, 2, 32}, DType::bf16, random);
  const Tensor usual = run_paged(query, inputs.keys(), here(causal()));
  for (const std::int64_t head : {0, 5, 8})  // one of a group's rows, that is
    set(query, {0, head, 1, 3}, 1e-36);
  const Tensor changed = run_paged(query, inputs.keys(), here(causal()));
  each_index(usual.sizes(), [&](const Dims& at) {
    const bool same_row = at[0] != 0 || at[2] != 1 || (at[1] != 0 && at[1] != 5 && at[1] != 8);
    if (same_row) {
      EXPECT_EQ(get(usual, at), get(changed, at));
    }
  });
  for (std::int64_t b = 0; b < 2; ++b) {
    const Call call = gathered_call(inputs, b, ConstTensorView(query).slice(0, b, b + 1), here(causal()));
    EXPECT_TRUE(same_bits(ConstTensorView(changed).slice(0, b, b + 1), call.run().out));
  }
}

TEST_P(Paged, neither_threads_nor_the_batch_change_a_bit) {
  const PagedInputs inputs({.lengths = {3000, 40, 900, 2049}, .page_size = 16, .head_dim = 64, .value_dim = 64});
  Random random(5);
  const Tensor query = normal({4, 4, 2, 64}, DType::f32, random);
  set_threads(1);
  const Tensor one = run_paged(query, inputs.keys(), here(causal()));
  set_threads(4);
  EXPECT_TRUE(same_bits(one, run_paged(query, inputs.keys(), here(causal()))));
  for (std::int64_t b = 0; b < 4; ++b) {
    PagedKeys alone = inputs.keys();
    alone.block_table = alone.block_table.slice(0, b, b + 1);
    alone.lengths = alone.lengths.slice(0, b, b + 1);
    EXPECT_TRUE(same_bits(ConstTensorView(one).slice(0, b, b + 1),
                          run_paged(ConstTensorView(query).slice(0, b, b + 1), alone, here(causal()))));
  }
}

TEST_P(Paged, nan_in_an_allowed_key_shows_in_its_own_sequence_only) {
  for (const std::int64_t queries : {1, 20}) {
    PagedInputs inputs({.lengths = {100, 100}});
    const auto page = static_cast<std::int64_t>(get(inputs.table, {1, 2}));
    set(inputs.value_pages.view(), {page, 3, 0, 0}, NAN);
    Random random(5);
    const Tensor query = normal({2, 2, queries, 24}, DType::f32, random);
    const Tensor out = run_paged(query, inputs.keys(), here({}));
    EXPECT_TRUE(std::isnan(get(out, {1, 0, 0, 0})));
    EXPECT_FALSE(std::isnan(get(out, {1, 1, 0, 0})));
    EXPECT_FALSE(std::isnan(get(out, {0, 0, 0, 0})));
    // Not in a row that may not attend to it.
    const Tensor windowed = run_paged(query, inputs.keys(), here(causal({.window = Window{5, 0}})));
    for (const Real value : read(windowed).values) EXPECT_FALSE(std::isnan(value));
  }
}

TEST_P(Paged, sizes_of_zero_are_legal) {
  const PagedInputs none({.lengths = {}});
  EXPECT_EQ(run_paged(Tensor({0, 2, 3, 24}), none.keys(), here(causal())).elements(), 0);
  const PagedInputs inputs({.lengths = {20, 0}});
  EXPECT_EQ(run_paged(Tensor({2, 2, 0, 24}), inputs.keys(), here(causal())).elements(), 0);
  const Tensor pages_k({0, 4, 2, 24}), pages_v({0, 4, 2, 20}), table({1, 0}, DType::i32), lengths({1}, DType::i32);
  const Tensor out = run_paged(Tensor({1, 2, 1, 24}), {pages_k, pages_v, table, lengths}, here(causal()));
  for (const Real value : read(out).values) EXPECT_EQ(value, 0);
}

ON_EVERY_ENGINE(Paged);

}  // namespace
}  // namespace headway::test
