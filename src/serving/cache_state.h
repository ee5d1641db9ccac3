// The parts of a KVCache. Private to the files of this folder.
#pragma once

#include <optional>
#include <shared_mutex>
#include <span>
#include <string_view>
#include <vector>

#include "core/text.h"
#include "headway/cache.h"
#include "serving/page_book.h"
#include "serving/rotation.h"

namespace headway {

// The pages of keys or of values.
struct PageStore {
  PageStore(const KVCacheConfig& config, std::int64_t width);

  Tensor data;                   // [pages, page_size, Hkv, width] of the cache's type, i8 or f8e4m3
  std::optional<Tensor> scales;  // [pages, page_size, Hkv], f32, for the 8-bit types
};

// The checked config, with value_dim set. InvalidArgument, TypeMismatch or Unsupported for an invalid one.
KVCacheConfig resolved(const KVCacheConfig& config);

// Of the pages' numbers.
DType page_type(const KVCacheConfig& config);

struct CacheState {
  explicit CacheState(const KVCacheConfig& checked);

  KVCacheConfig config;
  PageStore key;
  std::optional<PageStore> value;  // none with value_in_key
  PageBook book;
  std::optional<RopePairs> rope;
  mutable std::shared_mutex mutex;

  ConstTensorView value_pages() const {
    return value ? value->data.view() : key.data.view().slice(3, 0, config.value_dim.value());
  }
  const std::optional<Tensor>& value_scales() const { return value ? value->scales : key.scales; }
};

struct KVCache::State : CacheState {
  using CacheState::CacheState;
};

// The number of rows of each sequence of a call and, in a pack, where they begin.
struct RowCounts {
  std::vector<std::int64_t> counts, begins;
  bool packed = false;
};

// Of rows [B,..,S,..] (`rows` is S), or of a pack of `rows` rows with bounds that are checked.
RowCounts count_rows(std::string_view operation, std::size_t sequences, std::int64_t rows,
                     const std::optional<ConstTensorView>& cu_seqlens);

// The type and the device of the cache.
void check_cached_rows(std::string_view operation, const char* name, ConstTensorView view, const KVCacheConfig& config);

// The common parts of KVCache::append and KVCache::read.
void append_rows(CacheState& state, std::span<const std::int64_t> ids, const CacheRows& rows);
std::pair<Tensor, Tensor> read_rows(const CacheState& state, std::int64_t id, std::int64_t begin, std::int64_t end,
                                    void* stream);

}  // namespace headway
