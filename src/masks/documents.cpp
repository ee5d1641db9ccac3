// documents: which runs of keys have the id of a query.
#include <algorithm>

#include "core/out_of_memory.h"
#include "core/text.h"
#include "headway/error.h"
#include "masks/node.h"

namespace headway::masks {
namespace {

// Integers [n] or [B,n], by batch item; a view of them.
struct PerToken {
  PerToken(const char* name, const Integers& integers) : numbers(integers.numbers().data()) {
    const Dims& sizes = integers.sizes();
    if (sizes.size() != 1 && sizes.size() != 2) {
      throw InvalidArgument(text(name, " has shape ", sizes, ", expected (tokens,) or (batch, tokens)"));
    }
    batch = sizes.size() == 2 ? sizes[0] : 1;
    tokens = sizes.back();
  }
  std::span<const std::int64_t> of(std::int64_t batch_item) const {
    const std::int64_t b = batch == 1 ? 0 : batch_item;
    return {numbers + b * tokens, static_cast<std::size_t>(tokens)};
  }

  const std::int64_t* numbers;  // of the Integers
  std::int64_t batch = 1, tokens = 0;
};

// The runs of equal key ids of one batch item, grouped by id, and the group of each query.
class Runs {
 public:
  Runs(std::span<const std::int64_t> ids, std::span<const std::int64_t> key_ids) {
    std::vector<Run> runs = runs_of(key_ids);
    std::stable_sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.id < b.id; });
    std::vector<std::int64_t> known;  // the id of each group
    for (const Run& run : runs) {
      if (known.empty() || known.back() != run.id) {
        known.push_back(run.id);
        groups_.push_back(spans_.size());
      }
      spans_.push_back(run.span);
    }
    groups_.push_back(spans_.size());
    group_of_.reserve(ids.size());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      group_of_.push_back(i > 0 && ids[i] == ids[i - 1] ? group_of_.back() : group(known, ids[i]));
    }
  }

  // Of a query; tokens behind the last id have none.
  std::span<const Span> of(std::int64_t query) const {
    const auto i = static_cast<std::size_t>(query);
    if (i >= group_of_.size() || group_of_[i] == none) {
      return {};
    }
    const std::size_t begin = groups_[group_of_[i]];
    return {spans_.data() + begin, groups_[group_of_[i] + 1] - begin};
  }

 private:
  static constexpr std::size_t none = static_cast<std::size_t>(-1);
  struct Run {
    std::int64_t id;
    Span span;
  };

  static std::vector<Run> runs_of(std::span<const std::int64_t> ids) {
    std::vector<Run> runs;
    const auto tokens = static_cast<std::int64_t>(ids.size());
    for (std::int64_t begin = 0, end = 0; begin < tokens; begin = end) {
      const std::int64_t id = ids[static_cast<std::size_t>(begin)];
      for (end = begin + 1; end < tokens && ids[static_cast<std::size_t>(end)] == id; ++end) {
      }
      if (id >= 0) {
        runs.push_back({id, {begin, end}});
      }
    }
    return runs;
  }
  static std::size_t group(const std::vector<std::int64_t>& known, std::int64_t id) {
    const auto found = std::lower_bound(known.begin(), known.end(), id);
    return found != known.end() && *found == id ? static_cast<std::size_t>(found - known.begin()) : none;
  }

  std::vector<Span> spans_;
  std::vector<std::size_t> groups_;    // where each begins in spans_, and the end
  std::vector<std::size_t> group_of_;  // of each query
};

Mask documents_mask(const PerToken& ids, const PerToken& key_ids, MaskTraits traits, auto fits) {
  auto runs = std::make_shared<std::vector<Runs>>();
  for (std::int64_t b = 0; b < traits.batch; ++b) {
    runs->emplace_back(ids.of(b), key_ids.of(b));
  }
  const auto fill = [runs](const MaskRow& row, SpanLists& spans) {
    for (const Span& span : (*runs)[static_cast<std::size_t>(row.batch_item)].of(row.query)) {
      spans.add(span.begin, span.end);
    }
  };
  return span_mask(std::move(traits), fill, fits);
}

// Where each document of these lengths ends, for each batch item.
std::vector<std::vector<std::int64_t>> ends_of(const PerToken& lengths) {
  std::vector<std::vector<std::int64_t>> all;
  for (std::int64_t b = 0; b < lengths.batch; ++b) {
    std::vector<std::int64_t>& ends = all.emplace_back();
    std::int64_t total = 0;
    for (const std::int64_t length : lengths.of(b)) {
      if (length < 0 || __builtin_add_overflow(total, length, &total)) {
        throw InvalidArgument(
            text("masks.documents: lengths has ", length, ", expected 0 or more, and a sum below 2^63"));
      }
      ends.push_back(total);
    }
  }
  return all;
}

}  // namespace

Mask documents(const Integers& ids, const std::optional<Integers>& key_ids) try {
  const PerToken queries("masks.documents: ids", ids);
  const PerToken keys("masks.documents: key_ids", key_ids ? *key_ids : ids);
  if (queries.batch != keys.batch && queries.batch != 1 && keys.batch != 1) {
    throw InvalidArgument(text("masks.documents: key_ids has batch ", keys.batch, ", ids has ", queries.batch));
  }
  MaskTraits traits{.text = key_ids ? text("documents(", queries.tokens, " ids, ", keys.tokens, " key_ids)")
                                    : text("documents(", queries.tokens, " ids)"),
                    .batch = queries.batch == 1 ? keys.batch : queries.batch,
                    .drawn = {queries.tokens, keys.tokens}};
  const bool has_key_ids = key_ids.has_value();
  const std::int64_t id_count = queries.tokens, key_id_count = keys.tokens;
  const auto fits = [=](std::string_view operation, MaskSizes sizes) {
    if (sizes.queries != id_count) {
      throw InvalidArgument(text(operation, ": documents has ", id_count, " ids, expected one for each of the ",
                                 sizes.queries, " queries"));
    }
    if (sizes.keys != key_id_count) {
      throw InvalidArgument(text(operation, ": documents has ", key_id_count, has_key_ids ? " key_ids" : " ids",
                                 ", expected one for each of the ", sizes.keys, " keys",
                                 has_key_ids ? "" : ": give key_ids where they are not the queries' own tokens"));
    }
  };
  return documents_mask(queries, keys, std::move(traits), fits);
} catch (...) {
  throw_own_error("masks.documents");
}

Mask documents_of(const Integers& lengths) try {
  const PerToken counts("masks.documents: lengths", lengths);
  const auto all = std::make_shared<const std::vector<std::vector<std::int64_t>>>(ends_of(counts));
  std::int64_t tokens = 0;
  for (const std::vector<std::int64_t>& ends : *all) {
    tokens = std::max(tokens, ends.empty() ? 0 : ends.back());
  }
  const auto fill = [all](const MaskRow& row, SpanLists& spans) {
    const std::vector<std::int64_t>& ends = (*all)[static_cast<std::size_t>(row.batch_item)];
    const auto end = std::upper_bound(ends.begin(), ends.end(), row.query);
    if (end != ends.end()) {  // otherwise the query is behind the last document
      spans.add(end == ends.begin() ? 0 : *(end - 1), *end);
    }
  };
  const auto fits = [=](std::string_view operation, MaskSizes sizes) {
    if (sizes.queries != sizes.keys) {
      throw InvalidArgument(text(operation, ": documents of lengths are of queries and keys alike, found ",
                                 sizes.queries, " queries and ", sizes.keys, " keys: give ids and key_ids"));
    }
    if (sizes.queries < tokens) {
      throw InvalidArgument(text(operation, ": documents has lengths with a sum of ", tokens, ", expected at most the ",
                                 sizes.queries, " queries"));
    }
  };
  return span_mask(
      {.text = text("documents(", counts.tokens, " lengths)"), .batch = counts.batch, .drawn = {tokens, tokens}}, fill,
      fits);
} catch (...) {
  throw_own_error("masks.documents");
}

Mask tree(const Integers& parents) try {
  const PerToken tokens("masks.tree: parents", parents);
  // The smallest token from which on each is the parent of the next, up to this one: a path is few such runs.
  auto above = std::make_shared<std::vector<std::int64_t>>();
  for (std::int64_t b = 0; b < tokens.batch; ++b) {
    const std::span<const std::int64_t> of = tokens.of(b);
    const std::size_t begin = above->size();
    for (std::size_t i = 0; i < of.size(); ++i) {
      const auto index = static_cast<std::int64_t>(i);
      if (of[i] >= index || of[i] < -1) {
        throw InvalidArgument(text("masks.tree: parents[", tokens.batch == 1 ? "" : text(b, ", "), i, "] is ", of[i],
                                   ", expected a token before it, or -1 for a root"));
      }
      above->push_back(of[i] == index - 1 && i > 0 ? (*above)[begin + i - 1] : index);
    }
  }
  const std::int64_t count = tokens.tokens;
  const auto own = std::make_shared<const std::vector<std::int64_t>>(parents.numbers());
  const auto fill = [count, own, above](const MaskRow& row, SpanLists& spans) {
    static thread_local std::vector<Span> path;  // from the token up to its root
    path.clear();
    const std::int64_t base = row.batch_item * count;
    for (std::int64_t token = row.query; token >= 0;) {
      const std::int64_t top = (*above)[static_cast<std::size_t>(base + token)];
      path.push_back({top, token + 1});
      token = (*own)[static_cast<std::size_t>(base + top)];
    }
    spans.add(0, row.sizes.offset());
    for (auto run = path.rbegin(); run != path.rend(); ++run) {
      spans.add(run->begin + row.sizes.offset(), run->end + row.sizes.offset());
    }
  };
  const auto fits = [count](std::string_view operation, MaskSizes sizes) {
    if (sizes.queries != count || sizes.keys < count) {
      throw InvalidArgument(text(operation, ": tree has ", count,
                                 " tokens, expected as many as queries and at most as many as keys, found ",
                                 sizes.queries, " queries and ", sizes.keys, " keys"));
    }
  };
  return span_mask({.text = text("tree(", count, " tokens)"), .batch = tokens.batch, .drawn = {count, 0}}, fill, fits);
} catch (...) {
  throw_own_error("masks.tree");
}

}  // namespace headway::masks
