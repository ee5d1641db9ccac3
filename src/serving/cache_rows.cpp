// Writing tokens into pages and reading them back: KVCache::append and KVCache::read.
//
// An append is one pass over its rows: each is read once, rotated (or quantised) and written into its slot. 8-bit rows
// go through a staging buffer, since a row that 8 bits cannot hold must be refused before anything changes.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/ceil_div.h"
#include "core/elements.h"
#include "core/parallel.h"
#include "headway/threads.h"
#include "serving/cache_state.h"
#include "serving/on_device.h"

namespace headway {
namespace {

constexpr const char* append_operation = "KVCache::append";
constexpr std::int64_t block_tokens = 16;

// Runs action(begin, end) over blocks of tokens of `width` numbers each.
template <class Action>
void for_blocks(std::int64_t tokens, std::int64_t width, const Action& action) {
  const int threads = tokens * width < parallel_elements ? 1 : get_threads();
  parallel_for(ceil_div(tokens, block_tokens), threads, [&](std::int64_t task, int) {
    action(task * block_tokens, std::min(tokens, (task + 1) * block_tokens));
  });
}

// New keys or values: rows of several sequences, each number at offset(token) + head * head_stride + d *
// stride.
struct Rows {
  ConstTensorView view;
  bool packed;

  std::int64_t offset(std::int64_t b, std::int64_t row, std::int64_t s) const {
    return packed ? row * view.stride(0) : b * view.stride(0) + s * view.stride(2);
  }
  std::int64_t head_stride() const { return view.stride(1); }
  std::int64_t stride() const { return view.stride(-1); }
  std::int64_t width() const { return view.size(-1); }
};

struct Token {
  std::int64_t sequence, s, row;  // token s of the sequence's new ones; row of all new ones
  std::int64_t position;
};

std::vector<Token> tokens_of(const CacheState& state, std::span<const std::int64_t> ids, const RowCounts& rows) {
  std::vector<Token> tokens;
  for (std::size_t b = 0; b < ids.size(); ++b) {
    const std::int64_t length = state.book.at(append_operation, ids[b]).length;
    for (std::int64_t s = 0; s < rows.counts[b]; ++s) {
      const auto row = static_cast<std::int64_t>(tokens.size());
      tokens.push_back({.sequence = static_cast<std::int64_t>(b), .s = s, .row = row, .position = length + s});
    }
  }
  return tokens;
}

// The number of a token's slot among those of all pages.
std::int64_t slot_of(const PageBook& book, const PagedSequence& sequence, std::int64_t position) {
  const std::int64_t page = sequence.pages[static_cast<std::size_t>(position / book.page_size())];
  return page * book.page_size() + position % book.page_size();
}

// The cosines and sines of every token's position, [tokens, dims], where the cache rotates keys.
struct Turns {
  Turns(const CacheState& state, const std::vector<Token>& tokens) : pairs(*state.rope) {
    const auto count = static_cast<std::int64_t>(tokens.size()), dims = pairs.dims();
    table = Tensor::uninitialized({count, dims}, state.config.dtype == DType::f64 ? DType::f64 : DType::f32);
    constexpr std::int64_t cost = 16;  // of a sine, in copied numbers
    for_blocks(count, cost * dims, [&](std::int64_t begin, std::int64_t end) {
      with_float_type(table.dtype(), [&](auto type) {
        using Number = RotationType<decltype(type)>;
        for (std::int64_t t = begin; t < end; ++t) {
          pairs.turn(tokens[static_cast<std::size_t>(t)].position, static_cast<Number*>(table.data()) + t * dims);
        }
      });
    });
  }
  template <class Number>
  const Number* of(const Token& token) const {
    return static_cast<const Number*>(table.data()) + token.row * pairs.dims();
  }

  const RopePairs& pairs;
  Tensor table;
};

// ---- 8 bits ----

// A staging buffer for 8-bit rows until their pages are assigned.
struct Staged {
  Tensor data;    // [tokens, Hkv, width]
  Tensor scales;  // [tokens, Hkv]
};

std::int8_t nearest(float value, std::int8_t) {
  return static_cast<std::int8_t>(std::lrint(std::clamp(value, -127.0f, 127.0f)));
}
float8_e4m3 nearest(float value, float8_e4m3) { return float8_e4m3(std::clamp(value, -448.0f, 448.0f)); }

// One scale for a row; that of a row of zeros is the smallest normal number, as is that of rows so small that their own
// would lose bits. Returns whether the row was finite.
template <class Stored>
bool quantise_row(const std::vector<float>& row, Stored* out, float* scale) {
  constexpr float top = std::is_same_v<Stored, std::int8_t> ? 127.0f : 448.0f;
  float largest = 0;
  bool finite = true;
  for (const float x : row) {
    finite = finite && std::isfinite(x);
    largest = std::max(largest, std::fabs(x));
  }
  if (!finite) {
    return false;
  }
  *scale = std::max(largest / top, std::numeric_limits<float>::min());
  for (std::size_t d = 0; d < row.size(); ++d) {
    out[d] = nearest(row[d] / *scale, Stored{});
  }
  return true;
}

template <class T, class Stored>
void stage_block(const Turns* turns, const Rows& from, std::span<const Token> tokens, Staged& to,
                 std::atomic<std::int64_t>& first_bad) {
  const std::int64_t heads = to.data.size(1), width = from.width();
  std::vector<float> row(static_cast<std::size_t>(width));
  for (const Token& token : tokens) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const T* source = static_cast<const T*>(from.view.data()) + from.offset(token.sequence, token.row, token.s) +
                        h * from.head_stride();
      if (turns != nullptr) {
        rotate_row(turns->pairs, turns->of<float>(token), width, source, from.stride(), row.data(), std::int64_t{1});
      } else {
        for (std::int64_t d = 0; d < width; ++d) {
          row[static_cast<std::size_t>(d)] = converted<float>(source[d * from.stride()]);
        }
      }
      const std::int64_t place = token.row * heads + h;
      if (!quantise_row(row, static_cast<Stored*>(to.data.data()) + place * width, to.scales.as<float>() + place)) {
        std::int64_t known = first_bad.load();
        while (place < known && !first_bad.compare_exchange_weak(known, place)) {
        }
      }
    }
  }
}

Staged stage(const CacheState& state, std::span<const std::int64_t> ids, const char* name, const Rows& from,
             const std::vector<Token>& tokens, const Turns* turns) {
  const auto count = static_cast<std::int64_t>(tokens.size());
  const std::int64_t heads = state.config.kv_heads;
  const DType type = page_type(state.config);
  Staged staged{Tensor::uninitialized({count, heads, from.width()}, type),
                Tensor::uninitialized({count, heads}, DType::f32)};
  std::atomic<std::int64_t> first_bad = count * heads;
  for_blocks(count, heads * from.width(), [&](std::int64_t begin, std::int64_t end) {
    const auto block =
        std::span(tokens).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
    const auto run = [&](auto element, auto stored) {
      stage_block<decltype(element), decltype(stored)>(turns, from, block, staged, first_bad);
    };
    const auto with_stored = [&](auto element) {
      type == DType::i8 ? run(element, std::int8_t{}) : run(element, float8_e4m3{});
    };
    switch (from.view.dtype()) {
      case DType::bf16: return with_stored(bfloat16{});
      case DType::f16: return with_stored(float16{});
      default: return with_stored(float{});
    }
  });
  if (first_bad != count * heads) {
    const Token& token = tokens[static_cast<std::size_t>(first_bad / heads)];
    throw InvalidArgument(text(append_operation, ": ", name, " of sequence ",
                               ids[static_cast<std::size_t>(token.sequence)], ", token ", token.position, ", head ",
                               first_bad % heads, " holds NaN or Inf, which ", headway::name(state.config.quantize),
                               " pages cannot"));
  }
  return staged;
}

// ---- Writing ----

template <class T>
void copy_row(const T* from, std::int64_t stride, std::int64_t width, T* to) {
  if (stride == 1) {
    std::memcpy(to, from, static_cast<std::size_t>(width) * sizeof(T));
    return;
  }
  for (std::int64_t d = 0; d < width; ++d) {
    to[d] = from[d * stride];
  }
}

template <class T>
void write_block(const Turns* turns, const Rows& from, std::span<const Token> tokens,
                 std::span<const std::int64_t> slots, Tensor& pages) {
  const std::int64_t heads = pages.size(2), width = pages.size(3);
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    const Token& token = tokens[t];
    const T* source = static_cast<const T*>(from.view.data()) + from.offset(token.sequence, token.row, token.s);
    T* to = static_cast<T*>(pages.data()) + slots[t] * heads * width;
    for (std::int64_t h = 0; h < heads; ++h, source += from.head_stride(), to += width) {
      if (turns != nullptr) {
        rotate_row(turns->pairs, turns->of<RotationType<T>>(token), width, source, from.stride(), to, std::int64_t{1});
      } else {
        copy_row(source, from.stride(), width, to);
      }
    }
  }
}

void write_plain(const Turns* turns, const Rows& from, const std::vector<Token>& tokens,
                 const std::vector<std::int64_t>& slots, Tensor& pages) {
  for_blocks(static_cast<std::int64_t>(tokens.size()), pages.size(2) * pages.size(3),
             [&](std::int64_t begin, std::int64_t end) {
               const auto first = static_cast<std::size_t>(begin), count = static_cast<std::size_t>(end - begin);
               with_float_type(from.view.dtype(), [&](auto type) {
                 write_block<decltype(type)>(turns, from, std::span(tokens).subspan(first, count),
                                             std::span(slots).subspan(first, count), pages);
               });
             });
}

// rows[t] of `from` to slot slots[t] of `to`; both have rows of the same bytes.
void write_staged(const Tensor& from, const std::vector<std::int64_t>& slots, std::int64_t row_elements, Tensor& to) {
  const std::size_t bytes = static_cast<std::size_t>(row_elements) * size_of(to.dtype());
  for (std::size_t t = 0; t < slots.size() && bytes > 0; ++t) {
    std::memcpy(static_cast<char*>(to.data()) + static_cast<std::size_t>(slots[t]) * bytes,
                static_cast<const char*>(from.data()) + t * bytes, bytes);
  }
}

void copy_slots(const std::vector<PageCopy>& copies, Tensor& pages, void* stream) {
  if (pages.device() != Device{}) {
    for (const PageCopy& one : copies) {
      const TensorView view = pages.view();
      copy(view.select(0, one.from).slice(0, 0, one.slots), view.select(0, one.to).slice(0, 0, one.slots), stream);
    }
    return;
  }
  std::size_t slot_bytes = size_of(pages.dtype());
  for (int axis = 2; axis < pages.rank(); ++axis) {
    slot_bytes *= static_cast<std::size_t>(pages.size(axis));
  }
  const std::size_t page_bytes = static_cast<std::size_t>(pages.size(1)) * slot_bytes;
  auto* data = static_cast<char*>(pages.data());
  for (const PageCopy& copy : copies) {
    if (slot_bytes > 0) {
      std::memcpy(data + static_cast<std::size_t>(copy.to) * page_bytes,
                  data + static_cast<std::size_t>(copy.from) * page_bytes,
                  static_cast<std::size_t>(copy.slots) * slot_bytes);
    }
  }
}

void copy_slots(const std::vector<PageCopy>& copies, PageStore& store, void* stream) {
  copy_slots(copies, store.data, stream);
  if (store.scales) {
    copy_slots(copies, *store.scales, stream);
  }
}

// One operand of an append: keys or values. Everything that may fail is done in the constructor, before pages are
// assigned.
class Operand {
 public:
  Operand(const CacheState& state, std::span<const std::int64_t> ids, const char* name, const Rows& rows,
          const std::vector<Token>& tokens, const Turns* turns)
      : rows_(rows), turns_(turns) {
    if (state.config.quantize != CacheFormat::plain) {
      staged_ = stage(state, ids, name, rows, tokens, turns);
    }
  }

  void write(const std::vector<Token>& tokens, const std::vector<std::int64_t>& slots, PageStore& store) const {
    if (staged_) {
      write_staged(staged_->data, slots, store.data.size(2) * store.data.size(3), store.data);
      write_staged(staged_->scales, slots, store.data.size(2), *store.scales);
    } else {
      write_plain(turns_, rows_, tokens, slots, store.data);
    }
  }

 private:
  Rows rows_;
  const Turns* turns_;
  std::optional<Staged> staged_;
};

// ---- Checks ----

void check_rows(const CacheState& state, const char* name, ConstTensorView view, std::int64_t width,
                std::size_t sequences, const ConstTensorView& key, bool packed) {
  check_cached_rows(append_operation, name, view, state.config);
  const auto batch = static_cast<std::int64_t>(sequences);
  if (view.rank() != (packed ? 3 : 4)) {
    throw InvalidArgument(
        text(append_operation, ": ", name, " has shape ", view.sizes(), ", expected ",
             packed ? "(total, heads, dim) with cu_seqlens" : "(B, heads, S, dim) without cu_seqlens"));
  }
  const std::int64_t heads = state.config.kv_heads;
  const Dims expected =
      packed ? Dims{key.size(0), heads, width} : Dims{batch, heads, key.rank() == 4 ? key.size(2) : 0, width};
  if (view.sizes() != expected) {
    throw InvalidArgument(text(append_operation, ": ", name, " has shape ", view.sizes(), ", expected ", expected,
                               " for ", batch, batch == 1 ? " sequence" : " sequences"));
  }
}

void check_given(const CacheState& state, std::size_t sequences, const CacheRows& rows) {
  const bool packed = rows.cu_seqlens.has_value();
  check_rows(state, "key", rows.key, state.config.head_dim, sequences, rows.key, packed);
  if (rows.value.has_value() != state.value.has_value()) {
    throw InvalidArgument(text(append_operation, state.value
                                                     ? ": expected a value, found none"
                                                     : ": expected no value, as value_in_key takes it from the key"));
  }
  if (rows.value) {
    check_rows(state, "value", *rows.value, *state.config.value_dim, sequences, rows.key, packed);
  }
}

}  // namespace

namespace {

// Makes the sequences longer; the slots of the new tokens, and the copies to make before they are written.
struct Extended {
  std::vector<std::int64_t> slots;
  std::vector<PageCopy> copies;
};

Extended extend(CacheState& state, std::span<const std::int64_t> ids, const RowCounts& counts,
                const std::vector<Token>& tokens) {
  Extended extended{std::vector<std::int64_t>(tokens.size()), {}};
  extended.copies = state.book.append(append_operation, ids, counts.counts);
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    const PagedSequence& sequence = state.book.at(append_operation, ids[static_cast<std::size_t>(tokens[t].sequence)]);
    extended.slots[t] = slot_of(state.book, sequence, tokens[t].position);
  }
  return extended;
}

void append_to_host(CacheState& state, std::span<const std::int64_t> ids, const CacheRows& rows,
                    const RowCounts& counts, const std::vector<Token>& tokens) {
  std::optional<Turns> turns;
  if (state.rope) {
    turns.emplace(state, tokens);
  }
  const Operand key(state, ids, "key", {rows.key, counts.packed}, tokens, turns ? &*turns : nullptr);
  std::optional<Operand> value;
  if (rows.value) {
    value.emplace(state, ids, "value", Rows{*rows.value, counts.packed}, tokens, nullptr);
  }
  const Extended extended = extend(state, ids, counts, tokens);
  copy_slots(extended.copies, state.key, nullptr);
  key.write(tokens, extended.slots, state.key);
  if (value) {
    copy_slots(extended.copies, *state.value, nullptr);
    value->write(tokens, extended.slots, *state.value);
  }
}

// The bookkeeping stays on the host; the device only needs the slot of each row.
void append_to_device(CacheState& state, std::span<const std::int64_t> ids, const CacheRows& rows,
                      const RowCounts& counts, const std::vector<Token>& tokens) {
  std::vector<std::int64_t> positions;
  positions.reserve(tokens.size());
  for (const Token& token : tokens) {
    positions.push_back(token.position);
  }
  const Extended extended = extend(state, ids, counts, tokens);
  const auto write = [&](const ConstTensorView& view, PageStore& store, const std::optional<RopePairs>& rope) {
    copy_slots(extended.copies, store, rows.stream);
    headway::append_on_device(
        append_operation,
        {.rows = view,
         .packed = counts.packed,
         .slots = extended.slots,
         .positions = positions,
         .pages = store.data,
         .scales = store.scales ? std::optional<TensorView>(*store.scales) : std::nullopt,
         .rotation =
             rope ? std::optional(DeviceRotation{rope->frequencies(), rope->interleaved(), false}) : std::nullopt},
        rows.stream);
  };
  write(rows.key, state.key, state.rope);
  if (rows.value) {
    write(*rows.value, *state.value, std::nullopt);
  }
}

}  // namespace

void append_rows(CacheState& state, std::span<const std::int64_t> ids, const CacheRows& rows) {
  check_given(state, ids.size(), rows);
  const bool packed = rows.cu_seqlens.has_value();
  const RowCounts counts = count_rows(append_operation, ids.size(), rows.key.size(packed ? 0 : 2), rows.cu_seqlens);
  const std::vector<Token> tokens = tokens_of(state, ids, counts);
  if (state.config.device == Device{}) {
    append_to_host(state, ids, rows, counts, tokens);
  } else {
    append_to_device(state, ids, rows, counts, tokens);
  }
}

namespace {

// A page's slots in host memory.
Tensor on_host(ConstTensorView pages, std::int64_t page, void* stream) {
  const ConstTensorView one = pages.select(0, page);
  Tensor result = Tensor::uninitialized(one.sizes(), one.dtype());
  copy(one, result, stream);
  return result;
}

// Rows begin to end of a sequence as [Hkv, S, width] in host memory, 8 bits as f32. A page of a device is copied once.
Tensor gathered(const CacheState& state, const PagedSequence& sequence, std::int64_t begin, std::int64_t end,
                ConstTensorView pages, const std::optional<Tensor>& scales, void* stream) {
  const std::int64_t heads = pages.size(2), width = pages.size(3);
  const bool elsewhere = pages.device() != Device{};
  std::int64_t known = -1;  // the page that is here
  Tensor page_rows, page_scales;
  Tensor result = Tensor::uninitialized({heads, end - begin, width},
                                        state.config.quantize == CacheFormat::plain ? state.config.dtype : DType::f32);
  for (std::int64_t position = begin; position < end; ++position) {
    const std::int64_t slot = slot_of(state.book, sequence, position), size = state.book.page_size();
    if (elsewhere && slot / size != known) {
      known = slot / size;
      page_rows = on_host(pages, known, stream);
      page_scales = scales ? on_host(*scales, known, stream) : Tensor();
    }
    const ConstTensorView page = elsewhere ? ConstTensorView(page_rows) : pages.select(0, slot / size);
    const TensorView to = result.view().select(1, position - begin);
    copy(page.select(0, slot % size), to);  // [Hkv, width]
    if (scales) {
      const float* row_scales =
          elsewhere ? page_scales.as<float>() + slot % size * heads : scales->as<float>() + slot * heads;
      for (std::int64_t h = 0; h < heads; ++h) {
        const float scale = row_scales[h];
        for (std::int64_t d = 0; d < width; ++d) {
          to.at<float>({h, d}) *= scale;
        }
      }
    }
  }
  return result;
}

}  // namespace

std::pair<Tensor, Tensor> read_rows(const CacheState& state, std::int64_t id, std::int64_t begin, std::int64_t end,
                                    void* stream) {
  const PagedSequence& sequence = state.book.at("KVCache::read", id);
  if (begin < 0 || begin > end || end > sequence.length) {
    throw InvalidArgument(text("KVCache::read: expected 0 <= begin <= end <= ", sequence.length, " for sequence ", id,
                               ", found ", begin, " and ", end));
  }
  const std::int64_t first = state.config.first;
  if (std::max(begin, first) < std::min(end, sequence.freed)) {
    throw InvalidArgument(text("KVCache::read: keys ", first, " to ", sequence.freed - 1, " of sequence ", id,
                               " have been freed, found ", begin, " to ", end));
  }
  return {gathered(state, sequence, begin, end, state.key.data, state.key.scales, stream),
          gathered(state, sequence, begin, end, state.value_pages(), state.value_scales(), stream)};
}

}  // namespace headway
