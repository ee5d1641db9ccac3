// The spans of a whole mask: the entries of every batch item and head, in pieces that several threads compute.
#pragma once

#include <cstdint>
#include <vector>

#include "masks/node.h"

namespace headway {

struct MaskLists {
  std::vector<MaskEntries> pieces;  // in the order of batch items, heads, entries
  std::vector<SpanLists> lists;     // those of each piece
  std::int64_t rows = 1;            // queries of an entry
  std::int64_t entries = 0;         // of one batch item and head
  std::size_t longest = 0;          // the most spans of an entry

  // The queries of entry `entry` of a piece; the last of a sequence may have fewer than the others.
  static std::int64_t queries(const MaskEntries& piece, std::int64_t entry) {
    return std::min(piece.rows, piece.sizes.queries - entry * piece.rows);
  }
};

// Every batch item and head of the mask's own axes.
MaskLists lists_of(const MaskNode& node, MaskSizes sizes);

// The sequences of a pack, with entries of one query each. In each head they are consecutive.
struct PackedSizes {
  std::vector<MaskSizes> sequences;
  std::int64_t total_queries = 0;
  MaskSizes longest;
};
MaskLists packed_lists_of(const MaskNode& node, const PackedSizes& packed);

// Their tensor: [batch, heads, entries, longest, 2], i32 where the keys fit.
Tensor tensor_of(const MaskLists& lists, std::int64_t batch, std::int64_t heads, std::int64_t keys);

}  // namespace headway
