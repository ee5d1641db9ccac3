#include "masks/lists.h"

#include <limits>

#include "core/ceil_div.h"
#include "core/parallel.h"
#include "core/text.h"
#include "headway/error.h"
#include "headway/threads.h"

namespace headway {
namespace {

constexpr std::int64_t piece_entries = 2048;   // some 100 kB of spans
constexpr std::size_t pieces_for_threads = 8;  // fewer are made sooner than threads wake up

// Beyond this number the spans do not fit into memory, and counting them takes minutes.
void check_entries(std::int64_t entries, std::int64_t times) {
  constexpr std::int64_t most = std::int64_t{1} << 32;
  if (times > 0 && entries > most / times) {
    throw InvalidArgument(text("masks: expected at most 2^32 rows over all batch items and heads, found ", entries,
                               " for each of ", times));
  }
}

void add_pieces(MaskEntries whole, std::vector<MaskEntries>& pieces) {
  const std::int64_t end = whole.end;
  for (; whole.begin < end; whole.begin += piece_entries) {
    whole.end = std::min(whole.begin + piece_entries, end);
    pieces.push_back(whole);
  }
}

int threads_for(std::size_t pieces) { return pieces < pieces_for_threads ? 1 : get_threads(); }

void make_lists(const MaskNode& node, MaskLists& made) {
  for (const MaskEntries& piece : made.pieces) {
    made.lists.emplace_back(piece.sizes.keys);
  }
  parallel_for(static_cast<std::int64_t>(made.pieces.size()), threads_for(made.pieces.size()),
               [&](std::int64_t index, int) {
                 const auto piece = static_cast<std::size_t>(index);
                 made.lists[piece].reserve(made.pieces[piece].end - made.pieces[piece].begin);
                 node.append(made.pieces[piece], made.lists[piece]);
               });
  for (const SpanLists& lists : made.lists) {
    made.longest = std::max(made.longest, lists.longest());
  }
}

// The spans of one piece, followed by empty ones, so that each entry has `width`.
template <class Integer>
void store(const SpanLists& lists, std::int64_t width, Integer* to) {
  for (std::size_t list = 0; list < lists.size(); ++list) {
    Integer last = 0;
    const std::span<const Span> spans = lists[list];
    for (const Span& span : spans) {
      *to++ = static_cast<Integer>(span.begin);
      *to++ = last = static_cast<Integer>(span.end);
    }
    for (auto rest = static_cast<std::int64_t>(spans.size()); rest < width; ++rest) {
      *to++ = last;
      *to++ = last;
    }
  }
}

template <class Integer>
void store_all(const MaskLists& made, std::int64_t width, Integer* to) {
  std::vector<std::int64_t> places;  // of each piece, in entries
  std::int64_t place = 0;
  for (const MaskEntries& piece : made.pieces) {
    places.push_back(place);
    place += piece.end - piece.begin;
  }
  parallel_for(static_cast<std::int64_t>(made.pieces.size()), threads_for(made.pieces.size()),
               [&](std::int64_t index, int) {
                 const auto piece = static_cast<std::size_t>(index);
                 store(made.lists[piece], width, to + 2 * width * places[piece]);
               });
}

}  // namespace

MaskLists lists_of(const MaskNode& node, MaskSizes sizes) {
  MaskLists made;
  made.rows = node.traits.rows == 0 ? std::max<std::int64_t>(sizes.queries, 1) : node.traits.rows;
  made.entries = ceil_div(sizes.queries, made.rows);
  check_entries(made.entries, node.traits.batch * node.traits.heads);
  for (std::int64_t b = 0; b < node.traits.batch; ++b) {
    for (std::int64_t h = 0; h < node.traits.heads; ++h) {
      add_pieces({.sizes = sizes, .batch_item = b, .head = h, .begin = 0, .end = made.entries, .rows = made.rows},
                 made.pieces);
    }
  }
  make_lists(node, made);
  return made;
}

MaskLists packed_lists_of(const MaskNode& node, const PackedSizes& packed) {
  MaskLists made;
  made.entries = packed.total_queries;
  for (std::int64_t h = 0; h < node.traits.heads; ++h) {
    std::int64_t b = 0;
    for (const MaskSizes& sizes : packed.sequences) {
      add_pieces({.sizes = sizes, .batch_item = b++, .head = h, .begin = 0, .end = sizes.queries}, made.pieces);
    }
  }
  make_lists(node, made);
  return made;
}

Tensor tensor_of(const MaskLists& made, std::int64_t batch, std::int64_t heads, std::int64_t keys) {
  const auto width = std::max<std::int64_t>(static_cast<std::int64_t>(made.longest), 1);
  const DType dtype = keys <= std::numeric_limits<std::int32_t>::max() ? DType::i32 : DType::i64;
  Tensor spans = Tensor::uninitialized({batch, heads, made.entries, width, 2}, dtype);
  if (dtype == DType::i32) {
    store_all(made, width, spans.as<std::int32_t>());
  } else {
    store_all(made, width, spans.as<std::int64_t>());
  }
  return spans;
}

}  // namespace headway
