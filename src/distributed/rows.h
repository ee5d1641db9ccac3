// Arithmetic on ranges of rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "headway/distributed.h"

namespace headway::distributed {

// May be empty, with an end before its begin.
inline Rows overlap(Rows a, Rows b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

// In order, with ranges that touch or overlap made one.
inline Shard joined(Shard ranges) {
  std::sort(ranges.begin(), ranges.end(), [](Rows a, Rows b) { return a.begin < b.begin; });
  Shard result;
  for (const Rows& rows : ranges) {
    if (rows.count() <= 0) {
      continue;
    }
    if (!result.empty() && rows.begin <= result.back().end) {
      result.back().end = std::max(result.back().end, rows.end);
    } else {
      result.push_back(rows);
    }
  }
  return result;
}

// The intersection of two ordered lists.
inline Shard common(const Shard& a, const Shard& b) {
  Shard result;
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    if (const Rows both = overlap(a[i], b[j]); both.count() > 0) {
      result.push_back(both);
    }
    a[i].end < b[j].end ? ++i : ++j;
  }
  return result;
}

// The ranges of `a`, in its order, without the parts that `b` covers.
inline Shard without(const Shard& a, const Shard& b) {
  Shard result;
  const Shard removed = joined(b);
  for (Rows rest : a) {
    for (const Rows& gap : removed) {
      if (overlap(rest, gap).count() > 0) {
        if (gap.begin > rest.begin) {
          result.push_back({rest.begin, gap.begin});
        }
        rest.begin = std::min(gap.end, rest.end);
      }
    }
    if (rest.count() > 0) {
      result.push_back(rest);
    }
  }
  return result;
}

// Chunk `index` of `chunks` nearly equal ones of `length` rows: the first ones have one row more.
Rows chunk(std::int64_t length, std::int64_t chunks, std::int64_t index);

// InvalidArgument for less than one rank or a negative length.
void check_ranks(std::int64_t queries, std::int64_t keys, int ranks);

}  // namespace headway::distributed
