// A KV cache: the keys and values of many sequences in pages of one size, and attention over them.
//
//   KVCache cache({.pages = 1024, .page_size = 16, .kv_heads = 8, .head_dim = 128});
//   const std::int64_t id = cache.add();
//   cache.append(id, {.key = key, .value = value});     // [1,Hkv,S,D], [1,Hkv,S,Dv]
//   Tensor out = cache.attend(id, query);               // [1,H,Sq,D]: the last Sq tokens of the sequence
//
// A result is, bit for bit on the CPU, what attention gives on the sequence's keys and values in one tensor. Errors
// (too few pages, an unknown sequence, a shape) are thrown before anything changes. Several threads may use one cache:
// attend, read and other const functions run concurrently, functions that change it one at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "headway/attention.h"
#include "headway/cxx20.h"
#include "headway/rope.h"
#include "headway/serving.h"
#include "headway/tensor.h"

#pragma GCC visibility push(default)
namespace headway {

// How pages store numbers: unchanged, or in 8 bits with one f32 scale for each token and head of K and of V. A row with
// absolute maximum m is stored as the nearest multiples of m / 127, or as the nearest 8-bit floats times m / 448.
enum class CacheFormat : std::uint8_t { plain, int8, fp8 };

const char* name(CacheFormat format);  // "plain", "int8", "fp8"

struct KVCacheConfig {
  std::int64_t pages = 0;      // of all sequences together
  std::int64_t page_size = 0;  // tokens in a page
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  std::optional<std::int64_t> value_dim = {};  // head_dim if absent
  DType dtype = DType::f32;                    // of keys, values and queries
  Device device = {};                          // of the pages, and of keys, values and queries
  CacheFormat quantize = CacheFormat::plain;   // the 8-bit formats need dtype f32, bf16 or f16
  std::optional<RopeConfig> rope = {};         // rotates keys when they are appended and queries in attend
  // A query at position p sees the keys from p - window.left on, and the keys before `first`. An append begins by
  // freeing the keys that no later query sees, except the last `slack` of them.
  std::optional<Window> window = {};
  std::int64_t first = 0;
  std::int64_t slack = 0;
  std::optional<std::int64_t> value_in_key = {};  // values are this many first numbers of the keys, stored once
};

// One or more sequences: an id, {a, b}, or a vector.
class SequenceIds {
 public:
  SequenceIds(const std::int64_t& id HEADWAY_LIFETIMEBOUND) : ids_(&id, 1) {}  // NOLINT(*-explicit-*)
  SequenceIds(std::initializer_list<std::int64_t> ids) : ids_(ids.begin(), ids.size()) {}
  SequenceIds(const std::vector<std::int64_t>& ids HEADWAY_LIFETIMEBOUND) : ids_(ids) {}  // NOLINT(*-explicit-*)
  SequenceIds(std::span<const std::int64_t> ids) : ids_(ids) {}                           // NOLINT(*-explicit-*)
  operator std::span<const std::int64_t>() const { return ids_; }                         // NOLINT(*-explicit-*)

 private:
  std::span<const std::int64_t> ids_;
};

// New tokens of B sequences: key [B,Hkv,S,D] and value [B,Hkv,S,Dv]; or, with cu_seqlens [B+1], key [total,Hkv,D] and
// value [total,Hkv,Dv], where sequence b gets rows cu_seqlens[b] to cu_seqlens[b+1]. No value with value_in_key.
// cu_seqlens is always in host memory. On a CUDA device an append is queued on `stream`, a cudaStream_t, and does not
// wait; the caller must order calls on other streams.
struct CacheRows {
  ConstTensorView key;
  std::optional<ConstTensorView> value = {};
  std::optional<ConstTensorView> cu_seqlens = {};
  void* stream = nullptr;
};

class KVCache {
 public:
  explicit KVCache(const KVCacheConfig& config);
  KVCache(KVCache&& other) noexcept;
  KVCache& operator=(KVCache&& other) noexcept;
  ~KVCache();

  const KVCacheConfig& config() const;  // as given, with value_dim filled in
  std::int64_t free_pages() const;
  std::vector<std::int64_t> ids() const;       // of all sequences, in the order in which they were made
  std::int64_t length(std::int64_t id) const;  // tokens appended and not truncated, including freed ones

  std::int64_t add();                  // makes an empty sequence; returns its id, which is never used again
  std::int64_t fork(std::int64_t id);  // a second sequence over the same pages; a page is copied when one writes to it
  void truncate(std::int64_t id, std::int64_t length);  // removes the tokens from position `length` on
  void remove(std::int64_t id);

  // Adds tokens at the ends of the sequences, each at most once. OutOfPages if there are too few.
  void append(SequenceIds ids, const CacheRows& rows);

  // Attention of queries [B,H,Sq,D], the last Sq tokens of their sequences, over all keys that they may see;
  // out [B,H,Sq,Dv]. Packed: query [total,H,D] and cu_seqlens [B+1]. The options are those of attention_paged, in
  // addition to the cache's window and first keys.
  void attend(SequenceIds ids, ConstTensorView query, TensorView out,
              const AttentionOptions& options = {.causal = Causal::bottom_right},
              const AttentionOutputs& outputs = {}) const;
  Tensor attend(SequenceIds ids, ConstTensorView query,
                const AttentionOptions& options = {.causal = Causal::bottom_right},
                const AttentionOutputs& outputs = {}) const;
  void attend_packed(SequenceIds ids, ConstTensorView query, ConstTensorView cu_seqlens, TensorView out,
                     const AttentionOptions& options = {.causal = Causal::bottom_right},
                     const AttentionOutputs& outputs = {}) const;

  // The keys [Hkv,S,D] and values [Hkv,S,Dv] of tokens begin to end, in host memory, as attend reads them: rotated, and
  // 8-bit rows as f32. InvalidArgument if some were freed. A cache on a device is read in the order of `stream`.
  std::pair<Tensor, Tensor> read(std::int64_t id, std::int64_t begin, std::int64_t end, void* stream = nullptr) const;

  // Writes sequences, their ids and their pages as .safetensors; load checks the whole file. A cache on a device must
  // be idle.
  void save(const std::filesystem::path& path, bool overwrite = false) const;
  static KVCache load(const std::filesystem::path& path, Device device = {});

 private:
  struct State;
  explicit KVCache(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace headway
#pragma GCC visibility pop
