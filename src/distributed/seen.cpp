// What may be seen, as strips of pairs along the diagonal.
#include <algorithm>
#include <array>

#include "core/elements.h"
#include "core/key_range.h"
#include "core/spans.h"
#include "core/text.h"
#include "core/validate.h"
#include "distributed/global_problem.h"
#include "distributed/rows.h"

namespace headway::distributed {
namespace {

// A strip's pairs inside a rectangle. Between the rows where an edge of the strip meets an edge of the rectangle the
// number of keys of a row is linear in the row.
double pairs_of(const Strip& strip, Rows queries, Rows keys) {
  queries = overlap(queries, strip.queries);
  keys = overlap(keys, strip.keys);
  if (queries.count() <= 0 || keys.count() <= 0 || strip.first > strip.last) {
    return 0;
  }
  const auto keys_of_row = [&](std::int64_t i) {
    const std::int64_t begin = std::max(keys.begin, i + strip.first);
    const std::int64_t end = std::min(keys.end, i + strip.last + 1);
    return static_cast<double>(std::max<std::int64_t>(end - begin, 0));
  };
  std::array<std::int64_t, 6> corners = {queries.begin,
                                         keys.begin - strip.last - 1,
                                         keys.end - strip.last - 1,
                                         keys.begin - strip.first,
                                         keys.end - strip.first,
                                         queries.end};
  for (std::int64_t& corner : corners) {
    corner = std::clamp(corner, queries.begin, queries.end);
  }
  std::sort(corners.begin(), corners.end());
  double pairs = 0;
  for (std::size_t n = 0; n + 1 < corners.size(); ++n) {
    const std::int64_t rows = corners[n + 1] - corners[n];
    if (rows > 0) {
      pairs += (keys_of_row(corners[n]) + keys_of_row(corners[n + 1] - 1)) / 2 * static_cast<double>(rows);
    }
  }
  return pairs * strip.share;
}

// The keys that some row of `queries` sees: rows that follow each other see ranges that meet or overlap.
Rows keys_seen(const Strip& strip, Rows queries) {
  queries = overlap(queries, strip.queries);
  if (queries.count() <= 0 || strip.first > strip.last) {
    return {};
  }
  const Rows reached = {queries.begin + strip.first, queries.end + strip.last};
  const Rows keys = overlap(reached, strip.keys);
  return keys.count() > 0 ? keys : Rows{};
}

}  // namespace

Seen::Seen(std::int64_t queries, std::int64_t keys, std::vector<Strip> strips)
    : queries_(queries), keys_(keys), strips_(std::move(strips)) {
  for (const Strip& strip : strips_) {
    if (strip.queries.begin < 0 || strip.queries.end > queries || strip.keys.begin < 0 || strip.keys.end > keys) {
      throw InvalidArgument(text("distributed::Seen: expected strips inside ", queries, " queries and ", keys,
                                 " keys, found queries ", strip.queries.begin, " to ", strip.queries.end, ", keys ",
                                 strip.keys.begin, " to ", strip.keys.end));
    }
    longest_ = std::max(longest_, strip.queries.count());
  }
  std::stable_sort(strips_.begin(), strips_.end(),
                   [](const Strip& a, const Strip& b) { return a.queries.begin < b.queries.begin; });
}

// The strips that may meet these queries; those that end before them are skipped by halving.
template <class Visit>
void Seen::for_each_strip(Rows of_queries, const Visit& visit) const {
  auto strip = std::partition_point(strips_.begin(), strips_.end(),
                                    [&](const Strip& s) { return s.queries.begin + longest_ <= of_queries.begin; });
  for (; strip != strips_.end() && strip->queries.begin < of_queries.end; ++strip) {
    visit(*strip);
  }
}

double Seen::pairs(Rows of_queries, Rows of_keys) const {
  double total = 0;
  for_each_strip(of_queries, [&](const Strip& strip) { total += pairs_of(strip, of_queries, of_keys); });
  return total;
}

Shard Seen::keys_of(const Shard& of_queries) const {
  Shard found;
  for (const Rows& rows : of_queries) {
    for_each_strip(rows, [&](const Strip& strip) {
      if (const Rows keys_here = keys_seen(strip, rows); keys_here.count() > 0) {
        found.push_back(keys_here);
      }
    });
  }
  return joined(std::move(found));
}

Shard Seen::queries_of(const Shard& of_keys) const {
  Shard found;
  for (const Strip& strip : strips_) {
    for (const Rows& rows : of_keys) {
      const Rows keys_here = overlap(rows, strip.keys);
      if (keys_here.count() > 0 && strip.first <= strip.last) {
        found.push_back(overlap({keys_here.begin - strip.last, keys_here.end - strip.first}, strip.queries));
      }
    }
  }
  return joined(std::move(found));
}

namespace {

// Ranges of keys, row after row, as strips: rows whose ranges have the same ends, or ends that move on by one key a
// row, are one strip.
class StripBuilder {
 public:
  // `limits` has the strip of all rows without spans; the ranges of a row lie inside its keys.
  StripBuilder(const Strip& limits, std::vector<Strip>& strips) : limits_(limits), strips_(strips) {}
  StripBuilder(const StripBuilder&) = delete;
  StripBuilder& operator=(const StripBuilder&) = delete;
  ~StripBuilder() { end(); }

  void add(std::int64_t row, Rows keys) {
    if (rows_ > 0 && row == first_ + rows_ && begin_.takes(keys.begin, rows_) && end_.takes(keys.end, rows_)) {
      begin_.take(keys.begin);
      end_.take(keys.end);
      ++rows_;
      return;
    }
    end();
    first_ = row;
    rows_ = 1;
    begin_ = {keys.begin};
    end_ = {keys.end};
  }

 private:
  // One end of the ranges.
  struct Edge {
    std::int64_t first = 0;
    int step = undecided;  // 0 or 1 a row, from the second row on
    static constexpr int undecided = -1;
    bool takes(std::int64_t at, std::int64_t rows) const {
      return step == undecided ? at == first || at == first + 1 : at == first + step * rows;
    }
    void take(std::int64_t at) { step = step == undecided ? static_cast<int>(at - first) : step; }
    bool moves() const { return step == 1; }
  };

  void end() {
    if (rows_ == 0) {
      return;
    }
    Strip strip = limits_;
    strip.queries = {first_, first_ + rows_};
    const std::int64_t last = end_.first + (end_.moves() ? rows_ - 1 : 0);
    strip.keys = overlap({begin_.first, last}, limits_.keys);
    if (begin_.moves()) {
      strip.first = std::max(strip.first, begin_.first - first_);
    }
    if (end_.moves()) {
      strip.last = std::min(strip.last, end_.first - first_ - 1);
    }
    if (strip.keys.count() > 0) {
      strips_.push_back(strip);
    }
    rows_ = 0;
  }

  const Strip limits_;
  std::vector<Strip>& strips_;
  std::int64_t first_ = 0, rows_ = 0;
  Edge begin_, end_;
};

// The spans of the rows of `limits`, inside its keys.
void add_spans(const Problem& problem, const Sequence& sequence, std::int64_t b, Strip limits,
               std::vector<Strip>& strips) {
  const ConstTensorView& spans = *problem.spans;
  const std::int64_t heads = spans.stride(1) == 0 ? std::min<std::int64_t>(problem.heads, 1) : problem.heads;
  limits.share = 1.0 / static_cast<double>(std::max<std::int64_t>(heads, 1));
  const Rows rows = limits.queries;
  for (std::int64_t h = 0; h < heads; ++h) {
    for (std::int64_t slot = 0; slot < spans.size(3); ++slot) {
      StripBuilder builder(limits, strips);
      for (std::int64_t row = rows.begin; row < rows.end; ++row) {
        const std::int64_t entry = span_entry(problem, sequence, row - sequence.query_begin);
        const std::int64_t at = row_offset(spans, b, h, entry) + slot * spans.stride(3);
        const Rows keys = {sequence.key_begin + load_integer(spans, at),
                           sequence.key_begin + load_integer(spans, at + spans.stride(4))};
        if (keys.count() > 0) {
          builder.add(row, keys);
        }
      }
    }
  }
}

}  // namespace

Seen seen_by(const Problem& problem) {
  std::vector<Strip> strips;
  const RangeRule rule = range_rule(problem);
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const Sequence sequence = headway::sequence(problem, b);
    const std::int64_t shift = sequence.key_begin - sequence.query_begin;
    const auto add = [&](std::int64_t first_row, std::int64_t last_row, std::int64_t valid) {
      const Strip strip = {.queries = {sequence.query_begin + first_row, sequence.query_begin + last_row},
                           .keys = {sequence.key_begin, sequence.key_begin + valid},
                           .first = sequence.offset - rule.left + shift,
                           .last = sequence.offset + rule.right + shift};
      if (strip.queries.count() <= 0 || strip.keys.count() <= 0) {
        return;
      }
      if (problem.spans) {
        add_spans(problem, sequence, b, strip, strips);
      } else {
        strips.push_back(strip);
      }
    };
    const std::int64_t rows = std::min(sequence.real_queries, sequence.query_count);
    std::int64_t begin = 0;
    std::int64_t valid = sequence.key_count;
    for (std::int64_t i = 0; problem.valid_lens && i < rows; ++i) {  // a strip for each run of equal lengths
      const std::int64_t of_row = valid_length(problem, b, i);
      if (i > begin && of_row != valid) {
        add(begin, i, valid);
        begin = i;
      }
      valid = of_row;
    }
    add(begin, rows, valid);
  }
  return {problem.query.size(2), problem.key.size(2), std::move(strips)};
}

Seen seen(const Sizes& sizes, const AttentionOptions& options, const std::optional<Packing>& packing) {
  AttentionOptions without_matrices = options;
  without_matrices.mask.reset();
  without_matrices.bias.reset();
  return seen_by(global_problem({"distributed::seen", sizes, without_matrices, packing}));
}

}  // namespace headway::distributed
