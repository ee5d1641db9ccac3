// A cache as a file: a loaded cache is the saved one, and an inconsistent file is refused.
#include <unistd.h>

#include <filesystem>

#include "serving_support.h"

namespace headway::test {
namespace {

class CacheFile : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / ("headway_cache_" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::filesystem::path path(const std::string& name = "cache.safetensors") const { return folder_ / name; }

  std::string load_error(const SafetensorsFile& file) const {
    save_safetensors(path("changed"), {file.tensors.begin(), file.tensors.end()}, file.metadata, {.overwrite = true});
    const std::string prefix = "KVCache::load: " + path("changed").string() + ": ";
    const std::string found = error_text<FileError>([&] { KVCache::load(path("changed")); });
    return found.starts_with(prefix) ? found.substr(prefix.size()) : found;
  }

 private:
  std::filesystem::path folder_;
};

KVCache filled(KVCacheConfig config) {
  config.pages = 40;
  config.page_size = 4;
  config.kv_heads = 2;
  config.head_dim = 8;
  KVCache cache(config);
  const std::int64_t a = cache.add(), empty = cache.add();
  const auto append = [&](std::int64_t id, std::int64_t tokens, unsigned seed) {
    const Tensor key = random_tensor({1, 2, tokens, 8}, config.dtype, seed);
    const Tensor value = random_tensor({1, 2, tokens, *cache.config().value_dim}, config.dtype, seed + 1);
    if (config.value_in_key) {
      cache.append(id, {.key = key});
    } else {
      cache.append(id, {.key = key, .value = value});
    }
  };
  append(a, 13, 1);
  const std::int64_t b = cache.fork(a);
  append(a, 9, 3);
  append(b, 2, 5);
  append(b, 20, 6);
  cache.remove(empty);
  return cache;
}

std::vector<KVCacheConfig> configs() {
  const RopeConfig rope{.base = 1234.5, .dims = 4, .scaling = RopeScaling::yarn, .factor = 3.25, .original_length = 77};
  return {{},
          {.value_dim = 3, .dtype = DType::bf16},
          {.dtype = DType::f16, .quantize = CacheFormat::int8},
          {.quantize = CacheFormat::fp8, .rope = rope},
          {.dtype = DType::f64, .window = Window{5, 0}, .slack = 1},
          {.value_in_key = 5}};
}

TEST_F(CacheFile, gives_back_sequences_pages_and_results) {
  for (const KVCacheConfig& config : configs()) {
    KVCache cache = filled(config);
    cache.save(path(), true);
    KVCache loaded = KVCache::load(path());
    EXPECT_EQ(loaded.ids(), cache.ids());
    EXPECT_EQ(loaded.free_pages(), cache.free_pages());
    EXPECT_EQ(loaded.add(), cache.add());
    for (const std::int64_t id : cache.ids()) {
      EXPECT_EQ(loaded.length(id), cache.length(id));
      const Tensor query = random_tensor({1, 4, 1, 8}, config.dtype, 9);
      EXPECT_TRUE(same_bits(loaded.attend(id, query), cache.attend(id, query)));
    }
    const Tensor more = random_tensor({1, 2, 3, 8}, config.dtype, 11);
    const Tensor value = random_tensor({1, 2, 3, *cache.config().value_dim}, config.dtype, 12);
    for (KVCache* each : {&cache, &loaded}) {  // shared pages are still shared
      each->append(0, config.value_in_key ? CacheRows{.key = more} : CacheRows{.key = more, .value = value});
    }
    EXPECT_EQ(loaded.free_pages(), cache.free_pages());
  }
}

// Token 6 lay in a page that was freed whole.
TEST_F(CacheFile, a_sequence_may_end_inside_a_page_that_was_freed) {
  KVCache cache({.pages = 8, .page_size = 4, .kv_heads = 1, .head_dim = 8, .window = Window{0, 0}});
  const std::int64_t id = cache.add();
  for (std::int64_t tokens : {10, 1}) {
    const Tensor rows = random_tensor({1, 1, tokens, 8}, DType::f32, 1);
    cache.append(id, {.key = rows, .value = rows});
  }
  cache.truncate(id, 7);
  cache.save(path());
  KVCache loaded = KVCache::load(path());
  EXPECT_EQ(loaded.free_pages(), cache.free_pages());
  const Tensor more = random_tensor({1, 1, 3, 8}, DType::f32, 2), query = random_tensor({1, 1, 1, 8}, DType::f32, 3);
  for (KVCache* each : {&cache, &loaded}) each->append(id, {.key = more, .value = more});
  EXPECT_EQ(loaded.free_pages(), cache.free_pages());
  EXPECT_TRUE(same_bits(loaded.attend(id, query), cache.attend(id, query)));
}

TEST_F(CacheFile, a_file_that_says_something_else_is_refused) {
  filled({.window = Window{5, 0}}).save(path());
  EXPECT_NE(error_text<FileError>([&] { filled({}).save(path()); }), "no error");  // it exists
  const auto changed = [&](const auto& change) {
    SafetensorsFile file = load_safetensors(path());
    change(file);
    return load_error(file);
  };
  EXPECT_EQ(changed([](auto&) {}), "no error");
  EXPECT_EQ(changed([](auto& f) { f.metadata["cache"] = "else"; }),
            "expected cache to be headway.KVCache, found \"else\"");
  EXPECT_EQ(changed([](auto& f) { f.metadata.erase("pages"); }), "expected the metadata to say pages, found nothing");
  EXPECT_EQ(changed([](auto& f) { f.metadata["page_size"] = "-3"; }),
            "KVCache: expected page_size of 1 or more, found -3");
  EXPECT_EQ(changed([](auto& f) { f.metadata["pages"] = "1"; }).substr(0, 28), "expected at most the 1 pages");
  EXPECT_EQ(changed([](auto& f) { f.tensors.erase("lengths"); }), "expected a tensor lengths, found none");
  EXPECT_EQ(changed([](auto& f) { f.tensors["more"] = Tensor({1}); }), "found an unexpected tensor \"more\"");
  EXPECT_EQ(changed([](auto& f) { f.tensors.at("ids").template as<std::int64_t>()[1] = 0; }),
            "expected ids that go up and stay below next_id 3, found 0");
  EXPECT_EQ(changed([](auto& f) { f.tensors.at("lengths").template as<std::int64_t>()[0] = 1000000; }).substr(0, 19),
            "expected tables for");
  EXPECT_EQ(changed([](auto& f) { f.tensors.at("lengths").template as<std::int64_t>()[0] = -1; }).substr(0, 19),
            "expected tables for");
  EXPECT_EQ(changed([](auto& f) { f.tensors.at("freed").template as<std::int64_t>()[0] = -1; }).substr(0, 26),
            "expected freed of sequence");
  const auto entry = [&](std::int32_t page) {
    return changed([&](auto& f) {
      Tensor& tables = f.tensors.at("tables");
      tables.template as<std::int32_t>()[tables.elements() - 1] = page;
    });
  };
  EXPECT_EQ(entry(1000).substr(0, 13), "expected page");
  EXPECT_EQ(entry(-1).substr(0, 13), "expected page");
  EXPECT_EQ(entry(-7).substr(0, 13), "expected page");
}

}  // namespace
}  // namespace headway::test
