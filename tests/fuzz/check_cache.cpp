// A KV cache under random operations, beside a model of it that keeps every token: what it reads back and attends to,
// alone and in batches, is what attention gives on the model's rows, bit for bit; errors change nothing.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "fuzz/check.h"
#include "headway/cache.h"

namespace headway::test::fuzz {
namespace {

using Found = std::optional<Failure>;

RopeConfig rope_of(Rope rope, std::int64_t head_dim) {
  RopeConfig config;
  config.interleaved = rope == Rope::interleaved;
  if (rope == Rope::partial) config.dims = head_dim / 4 * 2;
  if (rope == Rope::linear) config.scaling = RopeScaling::linear;
  if (rope == Rope::yarn) config.scaling = RopeScaling::yarn;
  if (rope == Rope::llama3) config.scaling = RopeScaling::llama3;
  if (config.scaling != RopeScaling::none) {
    config.factor = 4;
    config.original_length = 64;
  }
  return config;
}

Tensor positions_from(std::int64_t first, std::int64_t count) {
  Tensor result({count}, DType::i64);
  for (std::int64_t i = 0; i < count; ++i) result.as<std::int64_t>()[i] = first + i;
  return result;
}

// A sequence as the model has it: its tokens as attend should read them, and how far it was freed.
struct Sequence {
  std::int64_t id = 0, length = 0, freed = 0;
  Tensor key, value;  // [1,Hkv,capacity,D]
};

class CacheCase {
 public:
  CacheCase(const Case& one, Engine engine)
      : one_(one), engine_(engine), random_(stream(one, 40)), extras_(stream(one, 42)), cache_(config_of(one)) {
    Random random = stream(one, 41);
    if (one.alibi != FloatType::none) slopes_ = normal({one.h}, DType::f32, random, one.alibi_size);
    if (one.sinks != FloatType::none) sinks_ = normal({one.h}, DType::f32, random, one.sinks_size);
    capacity_ = std::max<std::int64_t>(2 * one.sk, 8);
  }

  Found run() {
    add();
    for (int step = 0; step < 24; ++step) {
      Found found;
      switch (below(12)) {
        case 0: add(); break;
        case 1: found = fork(); break;
        case 2: found = truncate(); break;
        case 3: remove(); break;
        case 4:
        case 5:
        case 6:
        case 7: found = append(); break;
        default: found = attend(); break;
      }
      if (!found && engine_ != Engine::cuda && extras_() % 32 == 0) save_and_load();
      if (!found) found = check_rows();
      if (found) return found;
    }
    while (!sequences_.empty()) remove();
    if (cache_.free_pages() != cache_.config().pages)
      return Failure{"cache, free pages", std::to_string(cache_.free_pages()) + " of an empty cache of " +
                                              std::to_string(cache_.config().pages)};
    return std::nullopt;
  }

 private:
  static KVCacheConfig config_of(const Case& one) {
    KVCacheConfig config{.pages = 2 + 4 * one.sk / one.page,
                         .page_size = one.page,
                         .kv_heads = one.hkv,
                         .head_dim = one.d,
                         .value_dim = one.dv,
                         .dtype = one.type,
                         .quantize = one.stored};
    if (one.rope != Rope::none) config.rope = rope_of(one.rope, one.d);
    if (one.left >= 0) {
      config.window = Window{};
      config.window->left = one.left;
      if (one.right >= 0) config.window->right = one.right;
      config.first = one.first;
      config.slack = one.slack;
    }
    if (one.sharing == Sharing::columns) {
      config.value_dim.reset();
      config.value_in_key = one.dv;
    }
    return config;
  }

  bool in_8_bits() const { return one_.stored != CacheFormat::plain; }
  bool values_in_keys() const { return one_.sharing == Sharing::columns; }
  DType read_type() const { return in_8_bits() ? DType::f32 : one_.type; }
  std::int64_t below(std::int64_t end) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(std::max<std::int64_t>(end, 1)));
  }
  Sequence& some() { return sequences_[static_cast<std::size_t>(below(std::ssize(sequences_)))]; }
  static Failure failure(const std::string& what, const std::string& text) { return {"cache, " + what, text}; }

  void add() {
    sequences_.push_back({cache_.add(), 0, 0, Tensor({1, one_.hkv, capacity_, one_.d}, read_type()),
                          Tensor({1, one_.hkv, capacity_, one_.dv}, read_type())});
  }

  Found fork() {
    if (sequences_.empty()) return std::nullopt;
    const Sequence& from = some();
    Sequence copy{cache_.fork(from.id), from.length, from.freed, from.key.clone(), from.value.clone()};
    sequences_.push_back(std::move(copy));
    return std::nullopt;
  }

  void remove() {
    if (sequences_.empty()) return;
    const std::int64_t at = below(std::ssize(sequences_));
    cache_.remove(sequences_[static_cast<std::size_t>(at)].id);
    sequences_.erase(sequences_.begin() + at);
  }

  // Goes on with what a file kept of the cache.
  void save_and_load() {
    const std::filesystem::path path =
        std::filesystem::temp_directory_path() / ("headway_fuzz_cache_" + std::to_string(getpid()) + ".safetensors");
    try {
      cache_.save(path, true);
    } catch (const Unsupported&) {  // a build without .safetensors
      return;
    }
    cache_ = KVCache::load(path);
    std::filesystem::remove(path);
  }

  // The first freed key that a query at `position` sees, or -1. No key behind the sequence's `length` was freed.
  std::int64_t freed_key_seen(const Sequence& sequence, std::int64_t position, std::int64_t length) const {
    if (one_.left < 0) return -1;
    const std::int64_t lowest = std::max(one_.first, one_.left > position ? std::int64_t{0} : position - one_.left);
    return lowest < std::min(sequence.freed, length) ? lowest : -1;
  }

  Found truncate() {
    if (sequences_.empty()) return std::nullopt;
    Sequence& sequence = some();
    const std::int64_t length = below(sequence.length + 1);
    const std::int64_t seen = freed_key_seen(sequence, length, length);
    try {
      cache_.truncate(sequence.id, length);
    } catch (const InvalidArgument& error) {
      // A query at `length` may be said to see a freed key that stood there itself.
      if (seen < 0 && freed_key_seen(sequence, length, length + 1) < 0)
        return failure("truncate", std::string("refused to ") + std::to_string(length) + ": " + error.what());
      return std::nullopt;
    }
    if (seen >= 0) return failure("truncate", "a query there would see freed key " + std::to_string(seen));
    sequence.length = length;
    sequence.freed = std::min(sequence.freed, length);
    return std::nullopt;
  }

  // Up to three sequences, none twice.
  std::vector<Sequence*> some_sequences() {
    std::vector<Sequence*> list;
    for (Sequence& one : sequences_) list.push_back(&one);
    std::shuffle(list.begin(), list.end(), random_);
    list.resize(std::min<std::size_t>(list.size(), static_cast<std::size_t>(1 + below(3))));
    return list;
  }

  static std::vector<std::int64_t> ids_of(const std::vector<Sequence*>& list) {
    std::vector<std::int64_t> ids;
    for (const Sequence* one : list) ids.push_back(one->id);
    return ids;
  }

  // Packed rows [total,heads,width] of which sequence b has counts[b], or [B,heads,S,width] where counts are equal.
  struct Rows {
    Strided rows;
    std::vector<std::int64_t> starts;
    bool packed = false;

    // Those of sequence b: [1,heads,S,width].
    ConstTensorView of(std::size_t b) const {
      if (!packed) return rows.view().slice(0, static_cast<std::int64_t>(b), static_cast<std::int64_t>(b) + 1);
      return rows.view().slice(0, starts[b], starts[b + 1]).transpose(0, 1).unsqueeze(0);
    }
  };
  Rows draw_rows(const std::vector<std::int64_t>& counts, bool packed, std::int64_t heads, std::int64_t width,
                 Layout layout, Numbers numbers, double size) {
    Rows result;
    result.packed = packed;
    result.starts.push_back(0);
    for (const std::int64_t count : counts) result.starts.push_back(result.starts.back() + count);
    result.rows = packed ? Strided({result.starts.back(), heads, width}, one_.type, layout)
                         : Strided({std::ssize(counts), heads, counts.front(), width}, one_.type, layout);
    fill(result.rows.view(), numbers, size, random_);
    return result;
  }
  static Tensor bounds_of(const Rows& rows) { return Tensor::of<std::int64_t>({std::ssize(rows.starts)}, rows.starts); }

  Found append() {
    const std::vector<Sequence*> list = some_sequences();
    if (list.empty()) return std::nullopt;
    const bool packed = below(2) == 0;
    std::vector<std::int64_t> counts;
    for (std::size_t n = 0; n < list.size(); ++n)
      counts.push_back(packed || n == 0 ? below(below(2) == 0 ? 3 : std::max<std::int64_t>(one_.sk, 1)) : counts[0]);
    for (std::size_t n = 0; n < list.size(); ++n)
      if (list[n]->length + counts[n] > capacity_) return std::nullopt;
    const Rows keys = draw_rows(counts, packed, one_.hkv, one_.d, one_.k_layout, one_.k, one_.k_size);
    const Rows values = draw_rows(counts, packed, one_.hkv, one_.dv, one_.v_layout, one_.v, one_.v_size);
    const Tensor bounds = bounds_of(keys);
    CacheRows rows{.key = keys.rows.view()};
    if (!values_in_keys()) rows.value = values.rows.view();
    if (packed) rows.cu_seqlens = bounds;
    const std::int64_t free_before = cache_.free_pages();
    try {
      cache_.append(ids_of(list), rows);
    } catch (const OutOfPages&) {
      if (cache_.free_pages() != free_before) return failure("append", "a refused one changed the pages");
      return std::nullopt;  // check_rows sees that nothing else changed
    }
    for (std::size_t n = 0; n < list.size(); ++n) {
      const ConstTensorView key = keys.of(n);
      const ConstTensorView value = values_in_keys() ? ConstTensorView() : values.of(n);
      if (Found found = keep(*list[n], counts[n], key, value)) return found;
    }
    return std::nullopt;
  }

  // Notes new tokens of a sequence as attend should read them.
  Found keep(Sequence& sequence, std::int64_t count, ConstTensorView new_key, ConstTensorView new_value) {
    if (count == 0) return std::nullopt;
    const std::int64_t begin = sequence.length, end = begin + count;
    Tensor key = convert(new_key, read_type());
    if (one_.rope != Rope::none) key = rope(key, positions_from(begin, count), rope_of(one_.rope, one_.d));
    Tensor value = values_in_keys() ? Tensor(key.view().slice(3, 0, one_.dv).sizes(), read_type())
                                    : convert(new_value, read_type());
    if (values_in_keys()) copy(key.view().slice(3, 0, one_.dv), value);
    if (one_.left >= 0 && one_.left < begin - one_.slack)
      sequence.freed = std::max(sequence.freed, begin - one_.left - one_.slack);
    if (sequence.freed <= one_.first) sequence.freed = 0;
    sequence.length = end;
    if (in_8_bits()) {
      auto [read_key, read_value] = cache_.read(sequence.id, begin, end);
      if (const auto text = far_from(read_key, key)) return failure("keys in 8 bits", *text);
      if (!values_in_keys())
        if (const auto text = far_from(read_value, value)) return failure("values in 8 bits", *text);
      copy(read_key.view().unsqueeze(0), key);
      copy(read_value.view().unsqueeze(0), value);
    }
    copy(key, sequence.key.view().slice(2, begin, end));
    copy(value, sequence.value.view().slice(2, begin, end));
    return std::nullopt;
  }

  // The bound of docs/contract.md on rows [Hkv,S,D] that were read back from 8 bits.
  std::optional<std::string> far_from(const Tensor& found, const Tensor& rows) const {
    const Array exact = read(rows).reshaped(found.sizes());
    Array bound(found.sizes());
    const std::int64_t width = found.size(2);
    const bool integers = one_.stored == CacheFormat::int8;
    for (std::size_t row = 0; width > 0 && row < exact.values.size(); row += static_cast<std::size_t>(width)) {
      Real largest = 0;
      for (std::int64_t d = 0; d < width; ++d)
        largest = std::max(largest, std::abs(exact.values[row + static_cast<std::size_t>(d)]));
      const Real step = std::max(largest / (integers ? 127 : 448), 0x1p-126L);
      for (std::int64_t d = 0; d < width; ++d) {
        const std::size_t at = row + static_cast<std::size_t>(d);
        bound.values[at] =
            integers ? (0.5L + 0x1p-16L) * step : (0x1p-4L + 0x1p-22L) * std::abs(exact.values[at]) + 0x1p-10L * step;
        bound.values[at] += 0x1p-149L;
      }
    }
    return outside(found, exact, bound);
  }

  Found check_rows() {
    for (const Sequence& sequence : sequences_) {
      if (cache_.length(sequence.id) != sequence.length)
        return failure("length",
                       std::to_string(cache_.length(sequence.id)) + " instead of " + std::to_string(sequence.length));
      const std::int64_t kept_first = sequence.freed > 0 ? std::min(one_.first, sequence.length) : 0;
      const std::pair<std::int64_t, std::int64_t> parts[] = {{0, kept_first}, {sequence.freed, sequence.length}};
      for (const auto& [begin, end] : parts) {
        if (begin >= end) continue;
        const auto [key, value] = cache_.read(sequence.id, begin, end);
        if (auto text = differing(key, sequence.key.view().select(0, 0).slice(1, begin, end)))
          return failure("keys read back", *text);
        if (auto text = differing(value, sequence.value.view().select(0, 0).slice(1, begin, end)))
          return failure("values read back", *text);
      }
    }
    return std::nullopt;
  }

  Causal causal() const { return one_.causal == Causal::square ? Causal::bottom_right : one_.causal; }

  // The position of row 0 of `rows`, of which the first `live` are no padding, for windows and ALiBi.
  std::int64_t offset(const Sequence& sequence, std::int64_t rows, std::int64_t live) const {
    if (causal() == Causal::top_left) return 0;
    return sequence.length - (causal() == Causal::none ? rows : live);
  }

  AttentionOptions options() {
    AttentionOptions result{.causal = causal()};
    result.engine = engine_;
    if (!std::isnan(one_.scale)) result.scale = one_.scale;
    if (one_.softcap > 0) result.softcap = one_.softcap;
    if (slopes_) result.alibi_slopes = *slopes_;
    if (sinks_) result.sinks = *sinks_;
    return result;
  }

  Found attend() {
    const std::vector<Sequence*> list = some_sequences();
    if (list.empty()) return std::nullopt;
    const bool packed = below(2) == 0;
    std::vector<std::int64_t> counts, live;  // rows of each sequence, and those that are no padding
    std::string refusal;                     // what must be refused
    const bool padded = extras_() % 4 == 0;
    for (std::size_t n = 0; n < list.size(); ++n) {
      counts.push_back(packed || n == 0 ? below(below(2) == 0 ? 3 : one_.sq + 1) : counts[0]);
      const auto most = static_cast<std::uint64_t>(counts[n]) + 1;
      live.push_back(padded ? static_cast<std::int64_t>(extras_() % most) : counts[n]);
      const std::int64_t position = std::max<std::int64_t>(offset(*list[n], counts[n], live[n]), 0);
      if (live[n] > 0 && freed_key_seen(*list[n], position, list[n]->length) >= 0)
        refusal = "row 0 of sequence " + std::to_string(n) + " sees keys that were freed";
    }
    AttentionOptions asked = options();
    const Tensor query_lens = Tensor::of<std::int64_t>({std::ssize(live)}, live);
    if (padded) asked.query_lens = query_lens.view();
    const Rows queries = draw_rows(counts, packed, one_.h, one_.d, one_.q_layout, one_.q, one_.q_size);
    const Tensor bounds = bounds_of(queries);
    const ConstTensorView query = static_cast<const Strided&>(queries.rows).view();
    Dims out_sizes = query.sizes();
    out_sizes[out_sizes.size() - 1] = one_.dv;
    Tensor out = filled(out_sizes, one_.type, NAN);
    const DType lse_type = one_.type == DType::f64 ? DType::f64 : DType::f32;
    Tensor lse =
        filled(packed ? Dims{one_.h, query.size(0)} : Dims{query.size(0), one_.h, query.size(2)}, lse_type, NAN);
    try {
      if (packed)
        cache_.attend_packed(ids_of(list), query, bounds, out, asked, {.lse = lse});
      else
        cache_.attend(ids_of(list), query, out, asked, {.lse = lse});
    } catch (const InvalidArgument& error) {
      if (refusal.empty()) return failure("attend", error.what());
      return std::nullopt;
    }
    if (!refusal.empty()) return failure("attend", "not refused: " + refusal);
    for (std::size_t n = 0; n < list.size(); ++n) {
      const std::int64_t* const padding = padded ? &live[n] : nullptr;
      const Results expected = in_8_bits() && one_.type == DType::bf16 && engine_ == Engine::cpu
                                   ? in_a_call_of_its_own(*list[n], queries.of(n), counts[n], padding)
                                   : alone(*list[n], queries.of(n), counts[n], padding);
      const std::int64_t b = static_cast<std::int64_t>(n);
      const ConstTensorView found_out =
          packed ? out.view().slice(0, queries.starts[n], queries.starts[n + 1]).transpose(0, 1).unsqueeze(0)
                 : out.view().slice(0, b, b + 1);
      const ConstTensorView found_lse = packed
                                            ? lse.view().slice(1, queries.starts[n], queries.starts[n + 1]).unsqueeze(0)
                                            : lse.view().slice(0, b, b + 1);
      if (auto text = differing(found_out, expected.out)) return failure("attend, out", *text);
      if (auto text = differing(found_lse, expected.lse)) return failure("attend, lse", *text);
    }
    return std::nullopt;
  }

  // What the cache gives for one sequence of a batch: beside bf16 queries 8-bit rows need not give the bits of floats.
  Results in_a_call_of_its_own(const Sequence& sequence, ConstTensorView query, std::int64_t rows,
                               const std::int64_t* padded) {
    Results results{filled({1, one_.h, rows, one_.dv}, one_.type, NAN), filled({1, one_.h, rows}, DType::f32, NAN), {}};
    AttentionOptions asked = options();
    const Tensor query_lens = Tensor::of<std::int64_t>({1}, {padded != nullptr ? *padded : rows});
    if (padded != nullptr) asked.query_lens = query_lens.view();
    cache_.attend({sequence.id}, query, results.out, asked, {.lse = results.lse});
    return results;
  }

  // What attention gives on the model's rows of one sequence. Queries are rotated as the last tokens, whatever the
  // causal option.
  Results alone(const Sequence& sequence, ConstTensorView query, std::int64_t rows, const std::int64_t* padded) {
    const std::int64_t length = sequence.length, live = padded != nullptr ? *padded : rows;
    const std::int64_t first_position = offset(sequence, rows, live);
    Tensor turned = copied_to(query, {});
    if (one_.rope != Rope::none) turned = rope(turned, positions_from(length - live, rows), rope_of(one_.rope, one_.d));
    // Rounded once to the type of the query: the reference engine computes in float64.
    const DType computed = in_8_bits() && engine_ == Engine::reference ? DType::f64 : read_type();
    const Tensor asked = convert(turned, computed), key = convert(sequence.key.view().slice(2, 0, length), computed),
                 value = convert(sequence.value.view().slice(2, 0, length), computed);
    Call call{asked, key, value, options(), {}};
    const Tensor query_lens = Tensor::of<std::int64_t>({1}, {live});
    if (padded != nullptr) call.options.query_lens = query_lens.view();
    Tensor spans({1, 1, rows, 2, 2}, DType::i64);
    if (one_.left >= 0 && one_.first == 0) {
      call.options.window = Window{};
      call.options.window->left = one_.left;
      if (one_.right >= 0) call.options.window->right = one_.right;
    } else if (one_.left >= 0) {
      for (std::int64_t i = 0; i < rows; ++i) {
        const std::int64_t position = first_position + i;
        const std::int64_t end = one_.right >= 0 && one_.right < length - position
                                     ? std::max<std::int64_t>(position + one_.right + 1, 0)
                                     : length;
        const std::int64_t begin = one_.left > position ? 0 : position - one_.left;
        const std::int64_t entries[] = {0, std::min(one_.first, end), std::min(begin, end), end};
        if (i >= live) break;
        std::copy(std::begin(entries), std::end(entries), spans.as<std::int64_t>() + i * 4);
      }
      call.options.spans = static_cast<const Tensor&>(spans).view();
    }
    Results results = call.run();
    results.out = convert(results.out, one_.type);
    results.lse = convert(results.lse, one_.type == DType::f64 ? DType::f64 : DType::f32);
    return results;
  }

  const Case& one_;
  Engine engine_;
  Random random_, extras_;  // the latter for what was added later: lines of old findings keep their operations
  KVCache cache_;
  std::vector<Sequence> sequences_;
  std::optional<Tensor> slopes_, sinks_;
  std::int64_t capacity_ = 0;
};

}  // namespace

Found check_cache(const Prepared& prepared, Engine engine) { return CacheCase(prepared.materials.what, engine).run(); }

}  // namespace headway::test::fuzz
