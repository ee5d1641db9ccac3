#include "examples.h"

using namespace headway;

namespace {

void example_name() {
  std::cout << name(CacheFormat::int8) << '\n';  // int8
}

void example_KVCache() {
  KVCache cache({.pages = 8, .page_size = 4, .kv_heads = 1, .head_dim = 2});
  const std::int64_t id = cache.add();
  const Tensor key({1, 1, 3, 2});  // zeros: every key weighs the same
  const Tensor value = Tensor::of<float>({1, 1, 3, 2}, {1, 0, 2, 0, 6, 0});
  cache.append(id, {.key = key, .value = value});
  const Tensor query({1, 4, 1, 2});
  std::cout << cache.attend(id, query).at<float>({0, 0, 0, 0}) << '\n';  // 3

  const std::int64_t other = cache.fork(id);  // shares its page until one of them writes to it
  cache.truncate(other, 2);
  cache.append(other, {.key = key, .value = value});
  std::cout << cache.length(id) << ' ' << cache.length(other) << ' ' << cache.free_pages() << '\n';  // 3 5 5

  const Tensor packed({3, 4, 2});  // two queries of the first sequence, one of the second
  Tensor out({3, 4, 2});
  cache.attend_packed({id, other}, packed, cu_seqlens({2, 1}), out);
  std::cout << out.at<float>({0, 0, 0}) << ' ' << out.at<float>({2, 0, 0}) << '\n';  // 1.5 2.4

  const auto [keys, values] = cache.read(other, 1, 4);
  std::cout << values.sizes() << '\n';  // (1, 3, 2)

  cache.save("cache.safetensors");
  const KVCache loaded = KVCache::load("cache.safetensors");
  std::cout << loaded.ids().size() << ' ' << loaded.config().page_size << '\n';  // 2 4

  cache.remove(id);
  try {
    cache.remove(id);
  } catch (const UnknownSequence& error) {
    std::cout << error.what() << '\n';  // KVCache::remove: there is no sequence 0 any more
  }
}

}  // namespace

void cache_examples() {
  example_name();
  example_KVCache();
}
