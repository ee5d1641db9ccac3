// RoPE and the KV cache in a GPU's memory, against formulas and rows that the tests keep themselves.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <map>

#include "attention/cuda_engine.h"
#include "attention/cuda_memory.h"
#include "serving/serving_support.h"
#include "support/call.h"
#include "support/inputs.h"

namespace headway::test {
namespace {

constexpr Device gpu{DeviceType::cuda, 0};

Tensor on_device(const Tensor& tensor) {
  Tensor result = Tensor::uninitialized(tensor.sizes(), tensor.dtype(), gpu);
  copy(tensor, result);
  return result;
}

Tensor on_host(const Tensor& tensor) {
  Tensor result(tensor.sizes(), tensor.dtype());
  copy(tensor, result);
  return result;
}

class CudaRope : public CudaEngine {};

// |found - exact| for a rotation in f32 (f64): two products, a sum, two rounded factors, and the type's own rounding.
void expect_rotated(ConstTensorView x, ConstTensorView found, const Tensor& positions, const RopeConfig& config,
                    bool back) {
  const std::int64_t width = x.size(-1);
  const RopeFrequencies frequencies = rope_frequencies(width, config);
  const auto pairs = static_cast<std::int64_t>(frequencies.frequencies.size());
  const double unit = x.dtype() == DType::f64 ? 0x1p-52 : 0x1p-23;
  const double own = x.dtype() == DType::bf16 ? 0x1p-8 : x.dtype() == DType::f16 ? 0x1p-11 : unit;
  int bad = 0;
  each_index(Dims{x.size(0), x.size(1), x.size(2), pairs}, [&](const Dims& at) {
    const double angle = get(positions, {at[0], at[2]}) * frequencies.frequencies[static_cast<std::size_t>(at[3])];
    const double c = std::cos(angle) * frequencies.attention_factor;
    const double s = std::sin(angle) * frequencies.attention_factor * (back ? -1 : 1);
    const std::int64_t first = config.interleaved ? 2 * at[3] : at[3],
                       second = config.interleaved ? first + 1 : first + pairs;
    const double a = get(x, {at[0], at[1], at[2], first}), b = get(x, {at[0], at[1], at[2], second});
    const double expected[2] = {a * c - b * s, b * c + a * s};
    const double size = std::abs(a) + std::abs(b);
    const std::int64_t places[2] = {first, second};
    for (int n = 0; n < 2; ++n) {
      const double value = get(found, {at[0], at[1], at[2], places[n]});
      if (!(std::abs(value - expected[n]) <= 4 * unit * size + own * std::abs(expected[n])) && bad++ < 3)
        ADD_FAILURE() << "at " << at << ": expected " << expected[n] << ", found " << value;
    }
  });
  for (std::int64_t d = 2 * pairs; d < width; ++d) EXPECT_EQ(get(found, {0, 0, 0, d}), get(x, {0, 0, 0, d}));
}

TEST_F(CudaRope, rotates_rows_forward_and_back) {
  const std::vector<RopeConfig> configs = {
      {},
      {.base = 5e5, .dims = 20, .interleaved = true},
      {.scaling = RopeScaling::yarn, .factor = 4.0, .original_length = 64},
  };
  for (const DType type : {DType::f32, DType::f64, DType::bf16, DType::f16})
    for (const RopeConfig& config : configs)
      for (const bool back : {false, true}) {
        const Tensor x = random_tensor({2, 3, 5, 24}, type, 3);
        const Tensor positions = Tensor::of<std::int64_t>({2, 5}, {0, 1, 77, 100000, -3, 5, 6, 7, 8, 1 << 20});
        const Tensor there = on_device(x), far_positions = on_device(positions);
        const Tensor found = back ? rope_backward(there, positions, config) : rope(there, far_positions, config);
        expect_rotated(x, on_host(found), positions, config, back);
        Tensor in_place = on_device(x);
        back ? rope_backward(in_place, far_positions, in_place, config) : rope(in_place, positions, in_place, config);
        EXPECT_TRUE(same_bits(on_host(in_place), on_host(found)));
      }
}

TEST_F(CudaRope, refuses_places_that_do_not_belong_together) {
  const Tensor x({1, 2, 4}), positions = Tensor::of<std::int64_t>({2}, {0, 1});
  const Tensor there = on_device(x);
  Tensor out({1, 2, 4});
  EXPECT_EQ(error_text<InvalidArgument>([&] { rope(there, positions, out); }), "rope: out is on cpu, x is on cuda:0");
  EXPECT_EQ(error_text<InvalidArgument>([&] { rope(x, on_device(positions), out); }),
            "rope: positions is on cuda:0, x is on cpu");
}

// A cache on the device, and what its sequences should hold.
class CudaCache : public CudaEngine {
 protected:
  struct Rows {
    Tensor key, value;  // [Hkv, S, D]
  };

  void make(const KVCacheConfig& given) {
    KVCacheConfig config = given;
    config.device = gpu;
    cache.emplace(config);
  }

  static Tensor joined(ConstTensorView a, ConstTensorView b) {
    Tensor all({a.size(0), a.size(1) + b.size(1), a.size(2)}, a.dtype());
    copy(a, all.view().slice(1, 0, a.size(1)));
    copy(b, all.view().slice(1, a.size(1), all.size(1)));
    return all;
  }

  void append(const std::vector<std::int64_t>& ids, std::int64_t tokens) {
    const KVCacheConfig& config = cache->config();
    const auto batch = static_cast<std::int64_t>(ids.size());
    const Tensor key = random_tensor({batch, config.kv_heads, tokens, config.head_dim}, config.dtype, ++seed);
    const Tensor value = random_tensor({batch, config.kv_heads, tokens, *config.value_dim}, config.dtype, ++seed);
    cache->append(ids, {.key = on_device(key), .value = on_device(value)});
    for (std::int64_t b = 0; b < batch; ++b) {
      auto& rows = model
                       .try_emplace(ids[static_cast<std::size_t>(b)],
                                    Rows{Tensor({config.kv_heads, 0, config.head_dim}, config.dtype),
                                         Tensor({config.kv_heads, 0, *config.value_dim}, config.dtype)})
                       .first->second;
      rows.key = joined(rows.key, ConstTensorView(key).select(0, b));
      rows.value = joined(rows.value, ConstTensorView(value).select(0, b));
    }
  }

  // The rows of a sequence as attend should read them: those of the model, or what `read` says of 8-bit pages.
  Rows rows_of(std::int64_t id) {
    const std::int64_t length = cache->length(id);
    auto [key, value] = cache->read(id, 0, length);
    if (cache->config().quantize == CacheFormat::plain) {
      const Rows& kept = model.at(id);
      EXPECT_TRUE(same_bits(key, kept.key)) << "keys of " << id;
      EXPECT_TRUE(same_bits(value, kept.value)) << "values of " << id;
    }
    return {std::move(key), std::move(value)};
  }

  void expect_attends(const std::vector<std::int64_t>& ids, std::int64_t heads, std::int64_t queries) {
    const KVCacheConfig& config = cache->config();
    const auto batch = static_cast<std::int64_t>(ids.size());
    const Tensor query = random_tensor({batch, heads, queries, config.head_dim}, config.dtype, ++seed);
    const Tensor out = on_host(cache->attend(ids, on_device(query)));
    for (std::int64_t b = 0; b < batch; ++b) {
      const Rows rows = rows_of(ids[static_cast<std::size_t>(b)]);
      const Tensor own = convert(ConstTensorView(query).slice(0, b, b + 1), rows.key.dtype());
      AttentionOptions options{.causal = Causal::bottom_right};
      options.window = config.window;
      const Call call{own, rows.key.view().unsqueeze(0), rows.value.view().unsqueeze(0), options, {}};
      const Forward exact = forward(call.spec());
      EXPECT_TRUE(within(ConstTensorView(out).slice(0, b, b + 1), exact.out.value,
                         error_bound(exact.out, Kind::out, config.dtype)))
          << "sequence " << ids[static_cast<std::size_t>(b)] << ", " << queries << " queries";
    }
  }

  std::optional<KVCache> cache;
  std::map<std::int64_t, Rows> model;
  unsigned seed = 1;
};

TEST_F(CudaCache, holds_and_attends_to_what_was_appended) {
  for (const DType type : {DType::f32, DType::bf16, DType::f16})
    for (const CacheFormat format : {CacheFormat::plain, CacheFormat::int8, CacheFormat::fp8}) {
      SCOPED_TRACE(testing::Message() << type << " " << name(format));
      model.clear();
      make({.pages = 200, .page_size = 16, .kv_heads = 2, .head_dim = 64, .dtype = type, .quantize = format});
      const std::int64_t a = cache->add(), b = cache->add();
      append({a}, 200);
      append({b}, 3);
      append({a, b}, 1);
      expect_attends({a, b}, 4, 1);
      expect_attends({b}, 4, 4);
      append({b}, 150);
      expect_attends({b}, 4, 150);
      const std::int64_t c = cache->fork(a);
      model[c] = {joined(model.at(a).key, Tensor({2, 0, 64}, type)),
                  joined(model.at(a).value, Tensor({2, 0, 64}, type))};
      append({c}, 20);
      append({a}, 5);
      expect_attends({a, b, c}, 8, 2);
      cache->truncate(c, 30);
      for (Tensor* rows : {&model[c].key, &model[c].value}) *rows = convert(rows->view().slice(1, 0, 30), type);
      append({c}, 9);
      expect_attends({a, c}, 2, 1);
    }
}

TEST_F(CudaCache, quantises_as_the_cpu_does) {
  for (const CacheFormat format : {CacheFormat::int8, CacheFormat::fp8})
    for (const bool rotates : {false, true}) {
      KVCacheConfig config{.pages = 20, .page_size = 8, .kv_heads = 3, .head_dim = 40, .quantize = format};
      if (rotates) config.rope = RopeConfig{};
      KVCache here(config);
      config.device = gpu;
      KVCache there(config);
      const std::int64_t id = here.add();
      ASSERT_EQ(there.add(), id);
      const Tensor key = random_tensor({1, 3, 33, 40}, DType::f32, 5),
                   value = random_tensor({1, 3, 33, 40}, DType::f32, 6);
      here.append(id, {.key = key, .value = value});
      there.append(id, {.key = on_device(key), .value = on_device(value)});
      const auto [k, v] = here.read(id, 0, 33);
      const auto [far_k, far_v] = there.read(id, 0, 33);
      EXPECT_TRUE(same_bits(v, far_v));
      if (!rotates) {
        EXPECT_TRUE(same_bits(k, far_k));
        continue;
      }
      // A sine that was rounded the other way may move a number to the neighbouring one of 8 bits.
      int differ = 0;
      for (std::int64_t n = 0; n < k.elements(); ++n) differ += k.as<float>()[n] != far_k.as<float>()[n];
      EXPECT_LT(differ, k.elements() / 100);
    }
}

TEST_F(CudaCache, rotates_keys_and_queries_and_frees_what_the_window_left) {
  KVCacheConfig config{.pages = 12, .page_size = 16, .kv_heads = 2, .head_dim = 64, .dtype = DType::bf16};
  config.rope = RopeConfig{.base = 5e5};
  config.window = Window{64, 0};
  KVCache here(config);
  config.device = gpu;
  KVCache there(config);
  const std::int64_t id = here.add();
  ASSERT_EQ(there.add(), id);
  for (int step = 0; step < 30; ++step) {
    const std::int64_t tokens = step == 0 ? 70 : 5;
    const Tensor key = random_tensor({1, 2, tokens, 64}, DType::bf16, ++seed),
                 value = random_tensor({1, 2, tokens, 64}, DType::bf16, ++seed),
                 query = random_tensor({1, 4, tokens, 64}, DType::bf16, ++seed);
    here.append(id, {.key = key, .value = value});
    there.append(id, {.key = on_device(key), .value = on_device(value)});
    ASSERT_EQ(here.free_pages(), there.free_pages());
    const Tensor expected = here.attend(id, query), found = on_host(there.attend(id, on_device(query)));
    Array bound = read(expected);
    for (Real& number : bound.values) number = 0x1p-6L * std::fabs(number) + 0x1p-6L;
    EXPECT_TRUE(within(found, read(expected), bound)) << "step " << step;
  }
}

TEST_F(CudaCache, refuses_rows_of_other_places_before_anything_changes) {
  make({.pages = 4, .page_size = 4, .kv_heads = 1, .head_dim = 8});
  const std::int64_t id = cache->add();
  const Tensor rows({1, 1, 2, 8});
  EXPECT_EQ(error_text<InvalidArgument>([&] { cache->append(id, {.key = rows, .value = rows}); }),
            "KVCache::append: key is on cpu, the cache is on cuda:0");
  const Tensor many = on_device(Tensor({1, 1, 20, 8}));
  EXPECT_THROW(cache->append(id, {.key = many, .value = many}), OutOfPages);
  EXPECT_EQ(cache->length(id), 0);
  EXPECT_EQ(cache->free_pages(), 4);
}

TEST_F(CudaCache, a_row_with_nan_in_8_bits_shows_in_the_rows_that_attend_to_it) {
  make({.pages = 8, .page_size = 4, .kv_heads = 1, .head_dim = 8, .quantize = CacheFormat::int8});
  const std::int64_t id = cache->add(), other = cache->add();
  Tensor rows = random_tensor({1, 1, 6, 8}, DType::f32, 3);
  append({other}, 6);
  set(rows, {0, 0, 3, 2}, NAN);
  cache->append(id, {.key = on_device(rows), .value = on_device(rows)});
  const Tensor out = on_host(cache->attend({id, other}, on_device(random_tensor({2, 1, 6, 8}, DType::f32, 4))));
  EXPECT_FALSE(std::isnan(get(out, {0, 0, 2, 0})));
  EXPECT_TRUE(std::isnan(get(out, {0, 0, 3, 0})));
  EXPECT_FALSE(std::isnan(get(out, {1, 0, 5, 0})));
}

TEST_F(CudaCache, moves_through_a_file) {
  make({.pages = 20, .page_size = 16, .kv_heads = 2, .head_dim = 32, .dtype = DType::f16});
  const std::int64_t a = cache->add(), b = cache->add();
  append({a}, 40);
  append({b}, 17);
  const auto path = std::filesystem::temp_directory_path() / "headway_cuda_cache.safetensors";
  cache->save(path, true);
  cache.emplace(KVCache::load(path, gpu));
  expect_attends({a, b}, 4, 1);
  KVCache here = KVCache::load(path);
  EXPECT_TRUE(same_bits(here.read(a, 0, 40).first, model.at(a).key));
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace headway::test
