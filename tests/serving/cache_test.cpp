// KVCache: what attend gives is what attention gives on the sequence's own keys and values, bit for bit, however tokens
// came in, and errors leave the cache as it was.
#include "headway/cache.h"

#include <algorithm>
#include <cmath>
#include <thread>

#include "serving_support.h"

namespace headway::test {
namespace {

constexpr std::int64_t kv_heads = 2, heads = 4, dim = 8;

// A sequence's keys and values in one tensor each, beside the cache's id of it.
struct Sequence {
  std::int64_t id = 0;
  Tensor key, value;  // [1,Hkv,S,D]
};

Sequence random_sequence(KVCache& cache, std::int64_t tokens, unsigned seed) {
  const KVCacheConfig& config = cache.config();
  return {cache.add(), random_tensor({1, config.kv_heads, tokens, config.head_dim}, config.dtype, seed),
          random_tensor({1, config.kv_heads, tokens, *config.value_dim}, config.dtype, seed + 1000)};
}

void append(KVCache& cache, const Sequence& sequence, std::int64_t begin, std::int64_t end) {
  cache.append(sequence.id,
               {.key = sequence.key.view().slice(2, begin, end), .value = sequence.value.view().slice(2, begin, end)});
}

// attention of the reference engine over the first `length` tokens, which attention_paged runs on as well.
Tensor expected(const Sequence& sequence, std::int64_t length, ConstTensorView query, AttentionOptions options = {}) {
  options.causal = Causal::bottom_right;
  return attention(query, sequence.key.view().slice(2, 0, length), sequence.value.view().slice(2, 0, length), options);
}

TEST(KVCache, attend_gives_the_bits_of_attention_however_tokens_came_in) {
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    for (const std::int64_t page_size : {1, 3, 16, 64}) {
      KVCache cache({.pages = 200,
                     .page_size = page_size,
                     .kv_heads = kv_heads,
                     .head_dim = dim,
                     .value_dim = 6,
                     .dtype = dtype});
      const Sequence at_once = random_sequence(cache, 50, 7), one_by_one = random_sequence(cache, 50, 7);
      append(cache, at_once, 0, 50);
      for (std::int64_t begin = 0, step = 1; begin < 50;
           begin += step, step = std::min<std::int64_t>(step + 2, 50 - begin)) {
        append(cache, one_by_one, begin, begin + step);
      }
      for (const std::int64_t queries : {1, 5, 50}) {
        const Tensor query = random_tensor({1, heads, queries, dim}, dtype, 3);
        const Tensor wanted = expected(at_once, 50, query);
        EXPECT_TRUE(same_bits(cache.attend(at_once.id, query), wanted));
        EXPECT_TRUE(same_bits(cache.attend(one_by_one.id, query), wanted));
      }
    }
  }
}

TEST(KVCache, a_batch_or_a_pack_of_sequences_changes_no_bit) {
  KVCache cache({.pages = 100, .page_size = 4, .kv_heads = kv_heads, .head_dim = dim});
  std::vector<Sequence> sequences;
  std::vector<std::int64_t> ids;
  for (const std::int64_t tokens : {30, 1, 17}) {
    sequences.push_back(random_sequence(cache, tokens, static_cast<unsigned>(tokens)));
    append(cache, sequences.back(), 0, tokens);
    ids.push_back(sequences.back().id);
  }
  const Tensor query = random_tensor({3, heads, 2, dim}, DType::f32, 5);
  const Tensor out = cache.attend(ids, query);
  for (int b = 0; b < 3; ++b) {
    const ConstTensorView row = query.view().slice(0, b, b + 1);
    const auto length = cache.length(ids[static_cast<std::size_t>(b)]);
    EXPECT_TRUE(
        same_bits(out.view().slice(0, b, b + 1), expected(sequences[static_cast<std::size_t>(b)], length, row)));
  }
  const Tensor packed = random_tensor({6, heads, dim}, DType::f32, 6), bounds = cu_seqlens({3, 0, 3});
  Tensor packed_out({6, heads, dim});
  cache.attend_packed(ids, packed, bounds, packed_out);
  const auto by_head = [](ConstTensorView rows) { return rows.transpose(0, 1).unsqueeze(0); };
  EXPECT_TRUE(same_bits(by_head(packed_out.view().slice(0, 0, 3)),
                        expected(sequences[0], 30, by_head(packed.view().slice(0, 0, 3)))));
  EXPECT_TRUE(same_bits(by_head(packed_out.view().slice(0, 3, 6)),
                        expected(sequences[2], 17, by_head(packed.view().slice(0, 3, 6)))));
}

TEST(KVCache, packed_appends_are_appends) {
  KVCache cache({.pages = 100, .page_size = 4, .kv_heads = kv_heads, .head_dim = dim});
  const Tensor key = random_tensor({9, kv_heads, dim}, DType::f32, 1),
               value = random_tensor({9, kv_heads, dim}, DType::f32, 2);
  const std::int64_t a = cache.add(), b = cache.add();
  cache.append({a, b}, {.key = key, .value = value, .cu_seqlens = cu_seqlens({2, 7})});
  EXPECT_EQ(cache.length(a), 2);
  const auto [found_key, found_value] = cache.read(b, 0, 7);
  EXPECT_TRUE(same_bits(found_key, key.view().slice(0, 2, 9).transpose(0, 1)));
  EXPECT_TRUE(same_bits(found_value, value.view().slice(0, 2, 9).transpose(0, 1)));
}

TEST(KVCache, forks_go_their_own_ways_and_truncated_tokens_are_gone) {
  KVCache cache({.pages = 30, .page_size = 4, .kv_heads = kv_heads, .head_dim = dim});
  const Sequence first = random_sequence(cache, 20, 1);
  append(cache, first, 0, 10);
  Sequence second{cache.fork(first.id), first.key.clone(), first.value.clone()};
  EXPECT_EQ(cache.free_pages(), 27);
  copy(random_tensor({1, kv_heads, 10, dim}, DType::f32, 9), second.key.view().slice(2, 10, 20));
  append(cache, second, 10, 20);
  append(cache, first, 10, 20);
  const Tensor query = random_tensor({1, heads, 1, dim}, DType::f32, 3);
  EXPECT_TRUE(same_bits(cache.attend(first.id, query), expected(first, 20, query)));
  EXPECT_TRUE(same_bits(cache.attend(second.id, query), expected(second, 20, query)));
  cache.truncate(second.id, 13);
  EXPECT_TRUE(same_bits(cache.attend(second.id, query), expected(second, 13, query)));
  cache.remove(first.id);
  append(cache, second, 13, 20);
  EXPECT_TRUE(same_bits(cache.attend(second.id, query), expected(second, 20, query)));
  cache.remove(second.id);
  EXPECT_EQ(cache.free_pages(), 30);
}

TEST(KVCache, a_window_frees_pages_and_gives_what_the_window_option_gives) {
  KVCache cache({.pages = 6, .page_size = 4, .kv_heads = kv_heads, .head_dim = dim, .window = Window{7, 0}});
  const Sequence sequence = random_sequence(cache, 200, 4);
  const Tensor query = random_tensor({1, heads, 3, dim}, DType::f32, 3);
  for (std::int64_t length = 0; length < 200; length += 3) {
    const std::int64_t end = std::min<std::int64_t>(length + 3, 200);
    append(cache, sequence, length, end);
    const ConstTensorView rows = query.view().slice(2, 0, end - length);
    EXPECT_TRUE(same_bits(cache.attend(sequence.id, rows), expected(sequence, end, rows, {.window = Window{7, 0}})));
  }
  EXPECT_EQ(cache.length(sequence.id), 200);
}

TEST(KVCache, more_queries_than_keys_see_the_same_keys_beside_a_sequence_with_a_gap) {
  KVCache cache({.pages = 20,
                 .page_size = 4,
                 .kv_heads = kv_heads,
                 .head_dim = dim,
                 .window = Window{2, std::nullopt},
                 .first = 3});
  const Sequence few = random_sequence(cache, 2, 4), many = random_sequence(cache, 30, 5);
  append(cache, few, 0, 2);
  append(cache, many, 0, 30);
  const Tensor query = random_tensor({2, heads, 4, dim}, DType::f32, 3);  // the first two rows stand before the keys
  const AttentionOptions all{.causal = Causal::none};
  const Tensor alone = cache.attend(few.id, query.view().slice(0, 0, 1), all);
  EXPECT_TRUE(same_bits(alone, attention(query.view().slice(0, 0, 1), few.key, few.value)));
  const Tensor both = cache.attend({few.id, many.id}, query, all);
  EXPECT_TRUE(same_bits(alone, both.view().slice(0, 0, 1)));
}

TEST(KVCache, values_inside_of_keys_are_stored_once) {
  KVCache cache({.pages = 10, .page_size = 4, .kv_heads = 1, .head_dim = 12, .value_in_key = 8});
  const std::int64_t id = cache.add();
  const Tensor key = random_tensor({1, 1, 9, 12}, DType::f32, 2), query = random_tensor({1, 4, 2, 12}, DType::f32, 3);
  cache.append(id, {.key = key});
  EXPECT_TRUE(same_bits(cache.attend(id, query),
                        attention(query, key, key.view().slice(3, 0, 8), {.causal = Causal::bottom_right})));
  EXPECT_EQ(error_text<InvalidArgument>([&] { cache.append(id, {.key = key, .value = key}); }),
            "KVCache::append: expected no value, as value_in_key takes it from the key");
}

TEST(KVCache, keys_are_rotated_at_append_and_queries_at_attend) {
  const RopeConfig settings{.base = 100, .interleaved = true};
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    KVCache cache(
        {.pages = 30, .page_size = 4, .kv_heads = kv_heads, .head_dim = dim, .dtype = dtype, .rope = settings});
    Sequence sequence = random_sequence(cache, 20, 4);
    append(cache, sequence, 0, 6);
    append(cache, sequence, 6, 20);
    std::vector<std::int64_t> positions(20);
    for (std::size_t i = 0; i < 20; ++i) {
      positions[i] = static_cast<std::int64_t>(i);
    }
    const Tensor places = Tensor::of({20}, positions);
    const Tensor query = random_tensor({1, heads, 3, dim}, dtype, 3);
    sequence.key = rope(sequence.key, places, settings);
    const Tensor turned = rope(query, places.view().slice(0, 17, 20), settings);
    EXPECT_TRUE(same_bits(cache.attend(sequence.id, query), expected(sequence, 20, turned)));
  }
}

// ---- 8 bits ----

TEST(KVCache, eight_bit_rows_are_within_half_a_step_of_what_came_in) {
  for (const CacheFormat format : {CacheFormat::int8, CacheFormat::fp8}) {
    KVCache cache({.pages = 80, .page_size = 256, .kv_heads = 4, .head_dim = 16, .quantize = format});
    std::int64_t rows = 0;
    for (unsigned round = 0; round < 17; ++round) {
      const Sequence sequence = random_sequence(cache, 16384 / 4 * 4, round);
      Tensor key = sequence.key.clone();
      for (std::int64_t i = 0; i < key.elements(); ++i) {  // rows of very different sizes
        key.as<float>()[i] *= std::ldexp(1.0f, static_cast<int>(i / 16 % 61) - 30);
      }
      cache.append(sequence.id, {.key = key, .value = sequence.value});
      const auto [found, values] = cache.read(sequence.id, 0, 16384);
      for (std::int64_t row = 0; row < key.elements() / 16; ++row, ++rows) {
        const float* x = key.as<float>() + row * 16;
        const float* y = found.as<float>() + row * 16;
        float largest = 0;
        for (int d = 0; d < 16; ++d) {
          largest = std::max(largest, std::fabs(x[d]));
        }
        for (int d = 0; d < 16; ++d) {
          const double step = format == CacheFormat::int8 ? largest / 254.0
                                                          : std::max(std::fabs(x[d]) / 16.0, largest / 448.0 * 0x1p-10);
          ASSERT_LE(std::fabs(double{x[d]} - double{y[d]}), step * (1 + 1e-4)) << "row " << row;
        }
      }
      cache.remove(sequence.id);
    }
    EXPECT_GE(rows, 1'000'000);
  }
}

TEST(KVCache, eight_bit_results_are_attention_over_the_rows_read_back) {
  for (const CacheFormat format : {CacheFormat::int8, CacheFormat::fp8}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      KVCache cache({.pages = 30,
                     .page_size = 4,
                     .kv_heads = kv_heads,
                     .head_dim = dim,
                     .dtype = dtype,
                     .quantize = format,
                     .rope = RopeConfig{}});
      const Sequence at_once = random_sequence(cache, 20, 7), one_by_one = random_sequence(cache, 20, 7);
      append(cache, at_once, 0, 20);
      for (std::int64_t s = 0; s < 20; ++s) {
        append(cache, one_by_one, s, s + 1);
      }
      const Tensor query = random_tensor({1, heads, 2, dim}, dtype, 3);
      const Tensor out = cache.attend(at_once.id, query);
      EXPECT_TRUE(same_bits(out, cache.attend(one_by_one.id, query)));
      const auto [key, value] = cache.read(at_once.id, 0, 20);
      EXPECT_EQ(key.dtype(), DType::f32);
      const Tensor turned = rope(query, Tensor::of<std::int64_t>({2}, {18, 19}));
      const Tensor wanted = attention(convert(turned, DType::f32), key.view().unsqueeze(0), value.view().unsqueeze(0),
                                      {.causal = Causal::bottom_right});
      each_index(out.sizes(), [&](const Dims& at) {
        const double unit = dtype == DType::f32 ? 1e-5 : dtype == DType::f16 ? 0x1p-10 : 0x1p-7;
        ASSERT_NEAR(get(out, at), get(wanted, at), unit * (1 + std::fabs(get(wanted, at))));
      });
    }
  }
}

TEST(KVCache, rows_of_zeros_are_zeros_in_eight_bits_and_nan_is_refused) {
  for (const CacheFormat format : {CacheFormat::int8, CacheFormat::fp8}) {
    KVCache cache({.pages = 4, .page_size = 4, .kv_heads = 2, .head_dim = 4, .quantize = format});
    const std::int64_t id = cache.add();
    Tensor key({1, 2, 3, 4}), value({1, 2, 3, 4});
    value.at<float>({0, 0, 0, 0}) = 1e-44f;
    cache.append(id, {.key = key, .value = value});
    const auto [found_key, found_value] = cache.read(id, 0, 3);
    EXPECT_TRUE(same_bits(found_key, key.view().select(0, 0)));
    EXPECT_NEAR(found_value.at<float>({0, 0, 0}), 0.0f, 2e-38f);
    key.at<float>({0, 1, 2, 3}) = NAN;
    EXPECT_EQ(error_text<InvalidArgument>([&] { cache.append(id, {.key = key, .value = value}); }),
              std::string("KVCache::append: key of sequence 0, token 5, head 1 holds NaN or Inf, which ") +
                  name(format) + " pages cannot");
    EXPECT_EQ(cache.length(id), 3);
    EXPECT_EQ(cache.free_pages(), 3);
  }
}

// ---- Errors ----

TEST(KVCache, errors_come_before_anything_changes) {
  KVCache cache({.pages = 3, .page_size = 4, .kv_heads = 2, .head_dim = 8});
  const Sequence first = random_sequence(cache, 40, 1), second = random_sequence(cache, 40, 2);
  append(cache, first, 0, 6);
  const Tensor before = cache.read(first.id, 0, 6).first;
  const auto text_of = [](auto type, const auto& action) {
    return error_text<std::remove_pointer_t<decltype(type)>>(action);
  };
  constexpr InvalidArgument* invalid = nullptr;
  constexpr TypeMismatch* mismatch = nullptr;

  EXPECT_EQ(error_text<OutOfPages>([&] { append(cache, first, 6, 14); }),
            "KVCache::append: 2 pages of 4 tokens are needed, 1 of 3 are free");
  append(cache, first, 6, 12);
  EXPECT_EQ(error_text<OutOfPages>([&] { append(cache, first, 12, 13); }),
            "KVCache::append: 1 page of 4 tokens is needed, 0 of 3 are free");
  cache.truncate(first.id, 6);
  EXPECT_EQ(error_text<UnknownSequence>([&] { cache.length(7); }), "KVCache::length: there is no sequence 7");
  const std::int64_t gone = cache.add();
  cache.remove(gone);
  EXPECT_EQ(error_text<UnknownSequence>([&] { cache.fork(gone); }), "KVCache::fork: there is no sequence 2 any more");
  const Tensor row({2, 2, 1, 8}), wide({2, 2, 1, 9}), packed({3, 2, 8});
  EXPECT_EQ(text_of(invalid,
                    [&] {
                      cache.append({first.id, first.id}, {.key = row, .value = row});
                    }),
            "KVCache::append: expected each sequence once, found 0 twice");
  EXPECT_EQ(error_text<UnknownSequence>([&] {
              cache.append({first.id, 9}, {.key = row, .value = row});
            }),
            "KVCache::append: there is no sequence 9");
  EXPECT_EQ(text_of(invalid,
                    [&] {
                      cache.append({0, 1}, {.key = wide, .value = row});
                    }),
            "KVCache::append: key has shape (2, 2, 1, 9), expected (2, 2, 1, 8) for 2 sequences");
  EXPECT_EQ(text_of(invalid,
                    [&] {
                      cache.append({0, 1}, {.key = row});
                    }),
            "KVCache::append: expected a value, found none");
  EXPECT_EQ(text_of(invalid,
                    [&] {
                      cache.append({0, 1}, {.key = packed, .value = packed});
                    }),
            "KVCache::append: key has shape (3, 2, 8), expected (B, heads, S, dim) without cu_seqlens");
  EXPECT_EQ(text_of(invalid,
                    [&] {
                      cache.append(
                          {0, 1},
                          {.key = packed, .value = packed, .cu_seqlens = Tensor::of<std::int64_t>({3}, {0, 4, 3})});
                    }),
            "KVCache::append: cu_seqlens[2] is 3, expected numbers that go up from 0 to the 3 rows");
  const Tensor half({1, 2, 1, 8}, DType::f16);
  EXPECT_EQ(text_of(mismatch, [&] { cache.append(first.id, {.key = half, .value = half}); }),
            "KVCache::append: key has type f16, the cache has f32");
  EXPECT_EQ(text_of(mismatch, [&] { cache.attend(first.id, half); }),
            "KVCache::attend: query has type f16, the cache has f32");
  EXPECT_EQ(text_of(invalid,
                    [&] {
                      cache.attend({0, 1}, Tensor({1, 2, 1, 8}));
                    }),
            "KVCache::attend: query has batch 1, expected 2: one for each sequence");
  EXPECT_EQ(text_of(invalid, [&] { cache.truncate(first.id, 7); }),
            "KVCache::truncate: expected a length of 0 to 6 for sequence 0, found 7");
  EXPECT_EQ(text_of(invalid, [&] { cache.attend(first.id, Tensor({1, 3, 1, 8})); }).substr(0, 17), "KVCache::attend: ");

  EXPECT_EQ(cache.length(first.id), 6);
  EXPECT_EQ(cache.length(second.id), 0);
  EXPECT_EQ(cache.free_pages(), 1);
  EXPECT_TRUE(same_bits(cache.read(first.id, 0, 6).first, before));
}

TEST(KVCache, windows_do_not_go_back_past_what_they_freed) {
  const auto filled = [](std::int64_t slack) {
    KVCache cache({.pages = 50, .page_size = 2, .kv_heads = 2, .head_dim = 8, .window = Window{4, 0}, .slack = slack});
    const Sequence sequence = random_sequence(cache, 30, 1);
    for (std::int64_t s = 0; s < 30; ++s) {
      append(cache, sequence, s, s + 1);
    }
    return cache;
  };
  KVCache cache = filled(0);
  EXPECT_EQ(error_text<InvalidArgument>([&] { cache.truncate(0, 20); }),
            "KVCache::truncate: sequence 0 cannot go back to length 20: the next query would see keys from 16 on, and "
            "keys 0 to 24 have been freed; slack keeps more");
  EXPECT_EQ(
      error_text<InvalidArgument>([&] {
        cache.attend(0, Tensor({1, 2, 5, 8}));
      }),
      "KVCache::attend: the first of 5 queries of sequence 0 is at position 25 and sees keys from 21 on; keys 0 to "
      "24 have been freed");
  EXPECT_EQ(error_text<InvalidArgument>([&] { cache.read(0, 0, 30); }),
            "KVCache::read: keys 0 to 24 of sequence 0 have been freed, found 0 to 30");
  cache.truncate(0, 29);  // what the last append added
  cache.truncate(0, 0);
  EXPECT_EQ(cache.free_pages(), 50);
  KVCache roomy = filled(10);
  roomy.truncate(0, 20);
  EXPECT_EQ(error_text<InvalidArgument>([&] { roomy.truncate(0, 18); }).substr(0, 17), "KVCache::truncate");
  EXPECT_EQ(error_text<InvalidArgument>([&] {
              cache.attend(0, Tensor({1, 2, 1, 8}), {.window = Window{3, 0}});
            }),
            "KVCache::attend: the cache has a window of its own: expected no other, found one");
}

// Where row 0 of a call stands decides which keys it sees, and an option that moves it back may not reach keys that
// were freed: their pages may be another sequence's.
TEST(KVCache, no_option_shows_freed_keys) {
  for (const std::int64_t first : {0, 1}) {
    KVCache cache(
        {.pages = 60, .page_size = 1, .kv_heads = kv_heads, .head_dim = dim, .window = Window{2, {}}, .first = first});
    const Sequence other = random_sequence(cache, 1, 1), sequence = random_sequence(cache, 21, 2);
    append(cache, other, 0, 1);
    append(cache, sequence, 0, 20);
    append(cache, sequence, 20, 21);  // frees the keys before 18
    const Tensor query = random_tensor({1, heads, 4, dim}, DType::f32, 3);
    const Tensor one_row = Tensor::of<std::int64_t>({1}, {1}), half = Tensor::of<std::int64_t>({1}, {10});
    const auto text_of = [&](ConstTensorView queries, const AttentionOptions& options) {
      return error_text<InvalidArgument>([&] { cache.attend(sequence.id, queries, options); });
    };
    const std::string begin = "KVCache::attend: the first of 1 queries of sequence 1 is at position ";
    const std::string end = " on; keys " + std::to_string(first) + " to 17 have been freed";
    EXPECT_EQ(text_of(query, {.query_lens = one_row}), begin + "17 and sees keys from 15" + end);
    EXPECT_EQ(text_of(query.view().slice(2, 0, 1), {.causal = Causal::top_left}),
              begin + "0 and sees keys from " + std::to_string(first) + end);
    EXPECT_EQ(text_of(query.view().slice(2, 0, 1), {.causal = Causal::bottom_right, .valid_lens = half}),
              begin + "9 and sees keys from 7" + end);
    const ConstTensorView elsewhere(half.data(), DType::i64, Dims{1}, Device{DeviceType::cuda, 0});
    EXPECT_EQ(text_of(query, {.causal = Causal::bottom_right, .valid_lens = elsewhere}),
              "KVCache::attend: the cache has a window: expected valid_lens in host memory, found cuda:0");
    const Tensor packed = random_tensor({4, heads, dim}, DType::f32, 3), bounds = Tensor::of<std::int64_t>({2}, {0, 4});
    Tensor out(packed.sizes());
    EXPECT_EQ(error_text<InvalidArgument>(
                  [&] { cache.attend_packed(sequence.id, packed, bounds, out, {.query_lens = one_row}); }),
              begin + "17 and sees keys from 15" + end);
  }
}

TEST(KVCache, rows_stand_where_attention_has_them_under_every_causal_option) {
  for (const std::int64_t first : {0, 2}) {
    KVCache cache(
        {.pages = 60, .page_size = 4, .kv_heads = kv_heads, .head_dim = dim, .window = Window{3, 1}, .first = first});
    const Sequence sequence = random_sequence(cache, 21, 2);
    append(cache, sequence, 0, 21);  // frees nothing
    const Tensor query = random_tensor({1, heads, 5, dim}, DType::f32, 3);
    for (const Causal causal : {Causal::none, Causal::top_left, Causal::bottom_right}) {
      for (const std::int64_t rows : {5, 3}) {
        const Tensor query_lens = Tensor::of<std::int64_t>({1}, {rows});
        AttentionOptions options{.causal = causal, .query_lens = query_lens};
        const Tensor found = cache.attend(sequence.id, query, options);
        const std::int64_t offset = causal == Causal::none ? 21 - 5 : causal == Causal::top_left ? 0 : 21 - rows;
        Tensor mask({5, 21}, DType::b8);
        for (std::int64_t i = 0; i < 5; ++i) {
          for (std::int64_t j = 0; j < 21; ++j) {
            const std::int64_t p = i + offset;
            set(mask, {i, j}, j < first ? j <= p + 1 : p - 3 <= j && j <= p + 1);
          }
        }
        options.mask = mask;
        options.engine = Engine::reference;
        const Tensor wanted = attention(query, sequence.key, sequence.value, options);
        for (std::int64_t n = 0; n < found.elements(); ++n) {
          EXPECT_NEAR(found.as<float>()[n], wanted.as<float>()[n], 1e-5)
              << static_cast<int>(causal) << ", " << rows << " rows";
        }
      }
    }
  }
}

TEST(KVCache, configs_that_cannot_be_are_refused) {
  const KVCacheConfig good{.pages = 4, .page_size = 4, .kv_heads = 2, .head_dim = 8};
  const auto refused = [&](auto change) {
    KVCacheConfig config = good;
    change(config);
    return error_text<Error>([&] { KVCache cache(config); });
  };
  EXPECT_EQ(refused([](auto& c) { c.pages = -1; }), "KVCache: expected pages of 0 or more, found -1");
  EXPECT_EQ(refused([](auto& c) { c.page_size = 0; }), "KVCache: expected page_size of 1 or more, found 0");
  EXPECT_EQ(refused([](auto& c) { c.kv_heads = 0; }), "KVCache: expected kv_heads of 1 or more, found 0");
  EXPECT_EQ(refused([](auto& c) { c.first = 2; }), "KVCache: first 2 and slack 0 need a window, found none");
  EXPECT_EQ(refused([](auto& c) {
              c.window = Window{-1, 0};
            }),
            "KVCache: expected a window of 0 or more to each side, or None for unlimited, found -1");
  EXPECT_EQ(refused([](auto& c) { c.dtype = DType::i32; }),
            "KVCache: expected a dtype of f32, f64, bf16 or f16, found i32");
  const std::vector<Engine> there = engines();
  if (std::find(there.begin(), there.end(), Engine::cuda) == there.end()) {
    const std::string found = refused([](auto& c) { c.device = {DeviceType::cuda, 0}; });
    EXPECT_EQ(found.find("KVCache: the pages are to be on cuda:0, and the cuda engine says: "), 0U) << found;
  }
  EXPECT_EQ(refused([](auto& c) {
              c.dtype = DType::f64;
              c.quantize = CacheFormat::int8;
            }),
            "KVCache: quantised pages take f32, bf16 or f16, found f64");
  EXPECT_EQ(refused([](auto& c) { c.value_in_key = 9; }),
            "KVCache: expected value_in_key of 0 to the head_dim 8, found 9");
  EXPECT_EQ(refused([](auto& c) { c.rope = RopeConfig{.scaling = RopeScaling::dynamic}; }),
            "KVCache: dynamic rope scaling depends on the length of the text, and keys are rotated once: expected "
            "another");
  EXPECT_EQ(refused([](auto& c) {
              c.pages = 1 << 30;
              c.page_size = std::int64_t{1} << 40;
            }),
            "KVCache: pages of shape (1073741824, 1099511627776, 2, 8) would have more than 2^63 bytes");
}

TEST(KVCache, several_threads_may_use_one_cache) {
  KVCache cache({.pages = 400, .page_size = 4, .kv_heads = kv_heads, .head_dim = dim});
  const Tensor query = random_tensor({1, heads, 1, dim}, DType::f32, 3);
  std::vector<Sequence> sequences;
  for (unsigned i = 0; i < 4; ++i) {
    sequences.push_back(random_sequence(cache, 60, i));
  }
  std::vector<std::thread> threads;
  std::vector<int> same(4, 0);
  for (std::size_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (std::int64_t s = 0; s < 60; ++s) {
        append(cache, sequences[i], s, s + 1);
        cache.remove(cache.fork(sequences[i].id));
        same[i] += same_bits(cache.attend(sequences[i].id, query), expected(sequences[i], s + 1, query)) ? 1 : 0;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(same, std::vector<int>(4, 60));
}

}  // namespace
}  // namespace headway::test
