// KVCache: its functions, each of which locks and calls the implementation; and attend, one call of attention_paged.
#include "headway/cache.h"

#include <algorithm>
#include <mutex>

#include "core/elements.h"
#include "core/out_of_memory.h"
#include "serving/cache_state.h"

namespace headway {
namespace {

constexpr const char* attend_operation = "KVCache::attend";

// ---- attend ----

struct AttendCall {
  std::span<const std::int64_t> ids;
  ConstTensorView query;
  std::optional<ConstTensorView> cu_seqlens;
};

template <class... Parts>
[[noreturn]] void invalid(const Parts&... parts) {
  throw InvalidArgument(text(attend_operation, ": ", parts...));
}

void check_query(const CacheState& state, const AttendCall& call) {
  check_cached_rows(attend_operation, "query", call.query, state.config);
  const Dims& sizes = call.query.sizes();
  const bool packed = call.cu_seqlens.has_value();
  const auto sequences = static_cast<std::int64_t>(call.ids.size());
  if (sizes.size() != (packed ? 3 : 4)) {
    invalid("query has shape ", sizes, ", expected ",
            packed ? "(total, H, D) with cu_seqlens" : "(B, H, Sq, D) without cu_seqlens");
  }
  if (!packed && sizes[0] != sequences) {
    invalid("query has batch ", sizes[0], ", expected ", sequences, ": one for each sequence");
  }
  if (sizes[sizes.size() - 1] != state.config.head_dim) {
    invalid("query has head_dim ", sizes[sizes.size() - 1], ", the cache has ", state.config.head_dim);
  }
}

// The number of queries of each sequence; for padded rows it is in query_lens.
RowCounts query_counts(const AttendCall& call, const AttentionOptions& options) {
  const bool packed = call.cu_seqlens.has_value();
  RowCounts rows = count_rows(attend_operation, call.ids.size(), call.query.size(packed ? 0 : 2), call.cu_seqlens);
  if (options.query_lens) {
    const ConstTensorView& lens = *options.query_lens;
    if (!is_integer(lens.dtype()) || lens.sizes() != Dims{static_cast<std::int64_t>(call.ids.size())} ||
        lens.device() != Device{}) {
      invalid("expected query_lens of ", call.ids.size(), " integers in host memory, found ", lens.dtype(), " ",
              lens.sizes());
    }
    for (std::size_t b = 0; b < call.ids.size(); ++b) {
      const std::int64_t count = load_integer(lens, static_cast<std::int64_t>(b) * lens.stride(0));
      if (count < 0 || count > rows.counts[b]) {
        invalid("query_lens[", b, "] is ", count, ", expected 0 to ", rows.counts[b]);
      }
      rows.counts[b] = count;
    }
  }
  return rows;
}

// The sequences' tables as one, [B, most pages], and their lengths [B]. An entry whose tokens were freed is page 0,
// which the window masks.
struct Tables {
  Tensor block_table, lengths;
};

Tables tables_of(const CacheState& state, std::span<const std::int64_t> ids) {
  std::size_t widest = 0;
  for (const std::int64_t id : ids) {
    widest = std::max(widest, state.book.at(attend_operation, id).pages.size());
  }
  const auto sequences = static_cast<std::int64_t>(ids.size());
  Tables tables{Tensor::uninitialized({sequences, static_cast<std::int64_t>(widest)}, DType::i32),
                Tensor::uninitialized({sequences}, DType::i64)};
  for (std::size_t b = 0; b < ids.size(); ++b) {
    const PagedSequence& sequence = state.book.at(attend_operation, ids[b]);
    auto* row = tables.block_table.as<std::int32_t>() + b * widest;
    std::transform(sequence.pages.begin(), sequence.pages.end(), row,
                   [](std::int32_t page) { return std::max(page, std::int32_t{0}); });
    std::fill(row + sequence.pages.size(), row + widest, 0);
    tables.lengths.as<std::int64_t>()[b] = sequence.length;
  }
  return tables;
}

// Queries rotated to their positions: those of a sequence are its last tokens.
Tensor rotated(const CacheState& state, const AttendCall& call, const RowCounts& rows, const Tables& tables,
               void* stream) {
  Tensor result = Tensor::uninitialized(call.query.sizes(), call.query.dtype(), call.query.device(), stream);
  const bool packed = rows.packed;
  const std::int64_t each = call.query.size(packed ? 0 : 2), sequences = std::ssize(rows.counts);
  Tensor positions(packed ? Dims{each} : Dims{sequences, each}, DType::i64);  // 0 where rows are padding
  for (std::int64_t b = 0; b < sequences; ++b) {
    const std::int64_t count = rows.counts[static_cast<std::size_t>(b)];
    const std::int64_t first = tables.lengths.as<std::int64_t>()[b] - count;
    const std::int64_t begin = packed ? rows.begins[static_cast<std::size_t>(b)] : b * each;
    for (std::int64_t i = 0; i < count; ++i) {
      positions.as<std::int64_t>()[begin + i] = first + i;
    }
  }
  if (packed) {
    rope(call.query.transpose(0, 1), positions, result.view().transpose(0, 1), *state.config.rope, stream);
  } else {
    rope(call.query, positions, result, *state.config.rope, stream);
  }
  return result;
}

// The keys of each sequence that count for section 1's bottom_right: with one valid length for each, those.
std::vector<std::int64_t> ends_of_keys(const CacheState& state, const AttendCall& call,
                                       const std::optional<ConstTensorView>& valid_lens) {
  std::vector<std::int64_t> ends;
  for (std::size_t b = 0; b < call.ids.size(); ++b) {
    ends.push_back(state.book.at(attend_operation, call.ids[b]).length);
  }
  if (!valid_lens || valid_lens->rank() != 1 || valid_lens->size(0) != std::ssize(ends) ||
      !is_integer(valid_lens->dtype())) {  // attention_paged refuses what it cannot take
    return ends;
  }
  if (valid_lens->device() != Device{}) {
    invalid("the cache has a window: expected valid_lens in host memory, found ", valid_lens->device());
  }
  for (std::size_t b = 0; b < ends.size(); ++b) {
    const std::int64_t end = load_integer(*valid_lens, static_cast<std::int64_t>(b) * valid_lens->stride(0));
    ends[b] = end >= 0 && end < ends[b] ? end : ends[b];
  }
  return ends;
}

// The key position of each sequence's first query, section 1's offset(b): it may be negative.
std::vector<std::int64_t> first_positions(const CacheState& state, const AttendCall& call, const RowCounts& rows,
                                          const AttentionOptions& options) {
  const std::int64_t each = call.query.size(rows.packed ? 0 : 2);
  if (options.causal != Causal::none && options.causal != Causal::bottom_right) {
    return std::vector<std::int64_t>(call.ids.size(), 0);
  }
  const bool aligned = options.causal == Causal::bottom_right;
  std::vector<std::int64_t> positions = ends_of_keys(state, call, aligned ? options.valid_lens : std::nullopt);
  for (std::size_t b = 0; b < positions.size(); ++b) {
    std::int64_t with_padding = each;
    if (rows.packed) {
      with_padding = (b + 1 < positions.size() ? rows.begins[b + 1] : each) - rows.begins[b];
    }
    positions[b] -= aligned ? rows.counts[b] : with_padding;
  }
  return positions;
}

// The spans of keys that rows see where first keys are kept: those before `first`, and the window's. [B,1,Sq,2,2],
// packed [1,1,total,2,2].
Tensor first_and_window(const CacheState& state, const AttendCall& call, const RowCounts& rows,
                        const std::vector<std::int64_t>& positions) {
  const bool packed = rows.packed;
  const std::int64_t each = call.query.size(packed ? 0 : 2), sequences = std::ssize(rows.counts);
  Tensor spans(packed ? Dims{1, 1, each, 2, 2} : Dims{sequences, 1, each, 2, 2}, DType::i64);  // 0 to 0: empty
  const Window& window = *state.config.window;
  const std::int64_t first = state.config.first;
  for (std::size_t b = 0; b < call.ids.size(); ++b) {
    const std::int64_t length = state.book.at(attend_operation, call.ids[b]).length;
    const std::int64_t begin = packed ? rows.begins[b] : static_cast<std::int64_t>(b) * each;
    for (std::int64_t i = 0; i < rows.counts[b]; ++i) {
      const std::int64_t position = positions[b] + i;  // negative where there are more queries than keys
      const bool bounded = window.right && *window.right < length - position;
      const std::int64_t end = bounded ? std::max<std::int64_t>(position + *window.right + 1, 0) : length;
      auto* row = spans.as<std::int64_t>() + (begin + i) * 4;
      row[1] = std::min(first, end);
      row[2] = std::min(std::max(first, position - *window.left), end);
      row[3] = end;
    }
  }
  return spans;
}

// Whether some row sees keys after a gap.
bool needs_spans(const CacheState& state, const RowCounts& rows, const std::vector<std::int64_t>& positions) {
  const KeptKeys& kept = state.book.kept();
  for (std::size_t b = 0; kept.left && b < positions.size(); ++b) {
    const std::int64_t last = positions[b] + rows.counts[b] - 1;  // of the sequence's queries
    if (rows.counts[b] > 0 && last > kept.first && *kept.left < last - kept.first) {
      return true;
    }
  }
  return false;
}

// The cache's own window in the call's options.
void add_window(const CacheState& state, const AttendCall& call, const RowCounts& rows,
                const std::vector<std::int64_t>& positions, AttentionOptions& options) {
  const Window& window = *state.config.window;
  if (options.window && (options.window->left != window.left || options.window->right != window.right)) {
    invalid("the cache has a window of its own: expected no other, found one");
  }
  options.window = window;
  const KeptKeys& kept = state.book.kept();
  for (std::size_t b = 0; b < call.ids.size(); ++b) {
    const PagedSequence& sequence = state.book.at(attend_operation, call.ids[b]);
    const std::int64_t position = std::max<std::int64_t>(positions[b], 0);
    if (rows.counts[b] > 0 && !kept.all_seen_are_kept(position, sequence.length, sequence.freed)) {
      invalid("the first of ", rows.counts[b], " queries of sequence ", call.ids[b], " is at position ", position,
              " and sees keys from ", std::max(kept.first, position - *kept.left), " on; keys ", kept.first, " to ",
              sequence.freed - 1, " have been freed");
    }
  }
}

void attend_in(const CacheState& state, const AttendCall& call, TensorView out, AttentionOptions options,
               const AttentionOutputs& outputs) {
  check_query(state, call);
  const RowCounts rows = query_counts(call, options);
  const Tables tables = tables_of(state, call.ids);
  std::optional<Tensor> spans;
  if (state.config.window) {
    const std::vector<std::int64_t> positions = first_positions(state, call, rows, options);
    add_window(state, call, rows, positions, options);
    if (state.config.first > 0) {
      options.window->left.reset();  // up to there everything is seen
      if (needs_spans(state, rows, positions)) {
        if (options.spans) {
          invalid("the cache keeps first keys beside its window: expected no spans, found some");
        }
        spans = first_and_window(state, call, rows, positions);
        options.spans = *spans;
      }
    }
  }
  const PagedKeys keys{
      .key_pages = state.key.data,
      .value_pages = state.value_pages(),
      .block_table = tables.block_table,
      .lengths = tables.lengths,
      .key_scales = state.key.scales ? std::optional<ConstTensorView>(*state.key.scales) : std::nullopt,
      .value_scales = state.value_scales() ? std::optional<ConstTensorView>(*state.value_scales()) : std::nullopt};
  std::optional<Tensor> turned;
  if (state.rope) {
    turned = rotated(state, call, rows, tables, options.stream);
  }
  const ConstTensorView query = turned ? ConstTensorView(*turned) : call.query;
  if (call.cu_seqlens) {
    attention_paged(query, *call.cu_seqlens, keys, out, options, outputs);
  } else {
    attention_paged(query, keys, out, options, outputs);
  }
}

// Errors of attention_paged as attend's own.
template <class Error>
[[noreturn]] void rename(const Error& error) {
  const std::string found = error.what();
  const std::string_view inner = "attention_paged: ";
  throw Error(found.starts_with(inner) ? text(attend_operation, ": ", found.substr(inner.size())) : found);
}

void attend_renamed(const CacheState& state, const AttendCall& call, TensorView out, const AttentionOptions& options,
                    const AttentionOutputs& outputs) {
  try {
    const std::shared_lock lock(state.mutex);
    attend_in(state, call, out, options, outputs);
  } catch (const UnknownSequence&) {
    throw;
  } catch (const InvalidArgument& error) {
    rename(error);
  } catch (const TypeMismatch& error) {
    rename(error);
  } catch (const Unsupported& error) {
    rename(error);
  }
}

}  // namespace

// ---- KVCache ----

KVCache::KVCache(const KVCacheConfig& config) try : state_(std::make_unique<State>(resolved(config))) {
} catch (const OutOfMemory& error) {
  const std::string found = error.what();
  throw OutOfMemory(text("KVCache", found.substr(std::min(found.find(':'), found.size()))));
} catch (...) {
  throw_own_error("KVCache");
}

KVCache::KVCache(std::unique_ptr<State> state) : state_(std::move(state)) {}
KVCache::KVCache(KVCache&& other) noexcept = default;
KVCache& KVCache::operator=(KVCache&& other) noexcept = default;
KVCache::~KVCache() = default;

const KVCacheConfig& KVCache::config() const { return state_->config; }

std::int64_t KVCache::free_pages() const {
  const std::shared_lock lock(state_->mutex);
  return state_->book.free_pages();
}

std::vector<std::int64_t> KVCache::ids() const {
  const std::shared_lock lock(state_->mutex);
  std::vector<std::int64_t> result;
  for (const auto& [id, sequence] : state_->book.sequences()) {
    result.push_back(id);
  }
  return result;
}

std::int64_t KVCache::length(std::int64_t id) const {
  const std::shared_lock lock(state_->mutex);
  return state_->book.at("KVCache::length", id).length;
}

std::int64_t KVCache::add() try {
  const std::unique_lock lock(state_->mutex);
  return state_->book.add();
} catch (...) {
  throw_own_error("KVCache::add");
}

std::int64_t KVCache::fork(std::int64_t id) try {
  const std::unique_lock lock(state_->mutex);
  return state_->book.fork("KVCache::fork", id);
} catch (...) {
  throw_own_error("KVCache::fork");
}

void KVCache::truncate(std::int64_t id, std::int64_t length) {
  const std::unique_lock lock(state_->mutex);
  state_->book.truncate("KVCache::truncate", id, length);
}

void KVCache::remove(std::int64_t id) {
  const std::unique_lock lock(state_->mutex);
  state_->book.remove("KVCache::remove", id);
}

void KVCache::append(SequenceIds ids, const CacheRows& rows) try {
  const std::unique_lock lock(state_->mutex);
  append_rows(*state_, ids, rows);
} catch (...) {
  throw_own_error("KVCache::append");
}

void KVCache::attend(SequenceIds ids, ConstTensorView query, TensorView out, const AttentionOptions& options,
                     const AttentionOutputs& outputs) const try {
  attend_renamed(*state_, {.ids = ids, .query = query, .cu_seqlens = {}}, out, options, outputs);
} catch (...) {
  throw_own_error(attend_operation);
}

Tensor KVCache::attend(SequenceIds ids, ConstTensorView query, const AttentionOptions& options,
                       const AttentionOutputs& outputs) const try {
  Dims sizes = query.sizes();
  if (!sizes.empty()) {
    sizes[sizes.size() - 1] = *state_->config.value_dim;
  }
  Tensor out = Tensor::uninitialized(sizes, query.dtype(), query.device(), options.stream);
  attend(ids, query, out, options, outputs);
  return out;
} catch (...) {
  throw_own_error(attend_operation);
}

void KVCache::attend_packed(SequenceIds ids, ConstTensorView query, ConstTensorView cu_seqlens, TensorView out,
                            const AttentionOptions& options, const AttentionOutputs& outputs) const try {
  attend_renamed(*state_, {.ids = ids, .query = query, .cu_seqlens = cu_seqlens}, out, options, outputs);
} catch (...) {
  throw_own_error(attend_operation);
}

std::pair<Tensor, Tensor> KVCache::read(std::int64_t id, std::int64_t begin, std::int64_t end, void* stream) const try {
  const std::shared_lock lock(state_->mutex);
  return read_rows(*state_, id, begin, end, stream);
} catch (...) {
  throw_own_error("KVCache::read");
}

}  // namespace headway
