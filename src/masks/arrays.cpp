// Masks that are given as arrays: blocks, spans and bools.
#include <algorithm>

#include "core/ceil_div.h"
#include "core/out_of_memory.h"
#include "core/text.h"
#include "headway/error.h"
#include "masks/node.h"
#include "masks/runs.h"

namespace headway::masks {
namespace {

// The bytes 0 and 1 of bools of any strides, on any device, contiguous in host memory, as [B|1, H|1, rows, columns].
Tensor four_axes(const char* name, ConstTensorView bools) {
  if (bools.dtype() != DType::b8) {
    throw TypeMismatch(text(name, " has type ", bools.dtype(), ", expected bool (true = attend)"));
  }
  if (bools.rank() < 2 || bools.rank() > 4) {
    throw InvalidArgument(
        text(name, " has shape ", bools.sizes(), ", expected 2 axes, or 3 or 4 with heads and batch"));
  }
  Tensor host = copied_to(bools, Device{});
  while (bools.rank() < 4) {
    bools = bools.unsqueeze(0);
  }
  Tensor result = Tensor::uninitialized(bools.sizes(), DType::b8);
  const auto* from = static_cast<const std::uint8_t*>(host.data());
  std::transform(from, from + result.elements(), static_cast<std::uint8_t*>(result.data()),
                 [](std::uint8_t byte) { return std::uint8_t{byte != 0}; });
  return result;
}

const std::uint8_t* bytes_of(const Tensor& bools) { return static_cast<const std::uint8_t*>(bools.data()); }

// One list for each row of [B|1, H|1, rows, columns].
SpanLists runs_of(const Tensor& bools) {
  const std::int64_t columns = bools.size(3), rows = bools.size(0) * bools.size(1) * bools.size(2);
  SpanLists lists(columns);
  for (std::int64_t row = 0; row < rows; ++row) {
    for_each_run(bytes_of(bools) + row * columns, columns,
                 [&](std::int64_t begin, std::int64_t end) { lists.add(begin, end); });
    lists.close();
  }
  return lists;
}

// The list of a row among those of [batch, heads, entries].
std::size_t list_of(const MaskRow& row, std::int64_t heads, std::int64_t entries, std::int64_t entry) {
  return static_cast<std::size_t>((row.batch_item * heads + row.head) * entries + entry);
}

std::string counts_text(std::int64_t rows, std::int64_t columns) { return text(rows, " x ", columns); }

MaskTraits bool_traits(const char* function, const Tensor& bools) {
  const std::int64_t rows = bools.size(2), columns = bools.size(3);
  return {.text = text(function, "(", counts_text(rows, columns), ")"),
          .batch = bools.size(0),
          .heads = bools.size(1),
          .rows = rows == 1 ? 0 : 1,
          .drawn = {rows == 1 ? 0 : rows, columns == 1 ? 0 : columns}};
}

// Bools repeat along an axis of size 1, as they do in the mask option.
void check_bools(std::string_view operation, const char* function, MaskSizes own, MaskSizes sizes) {
  if ((own.queries != 1 && own.queries != sizes.queries) || (own.keys != 1 && own.keys != sizes.keys)) {
    throw InvalidArgument(text(operation, ": ", function, " has ", counts_text(own.queries, own.keys),
                               " bools, expected ", counts_text(sizes.queries, sizes.keys)));
  }
}

// Checks that a size is at least 1, and that `count` of them are at most 2^60.
void check_size(const char* name, std::int64_t size, std::int64_t count) {
  if (size < 1) {
    throw InvalidArgument(text(name, " is ", size, ", expected 1 or more"));
  }
  if (size > (std::int64_t{1} << 60) / std::max<std::int64_t>(count, 1)) {
    throw InvalidArgument(text(name, " is ", size, ", expected ", count, " of them to be at most 2^60"));
  }
}

// Spans [.., N, R, 2] as a list for each of the B H N entries, and the largest end.
struct GivenSpans {
  SpanLists lists{std::int64_t{1} << 60};
  std::int64_t largest = 0;
};

GivenSpans given_spans(const Integers& spans) {
  const std::vector<std::int64_t>& numbers = spans.numbers();
  const auto width = static_cast<std::size_t>(spans.sizes().at(-2));
  const std::size_t entries = width == 0 ? 0 : numbers.size() / (2 * width);
  GivenSpans result;
  std::vector<Span> entry(width);
  for (std::size_t e = 0; e < entries; ++e) {
    for (std::size_t r = 0; r < width; ++r) {
      entry[r] = {numbers[2 * (e * width + r)], numbers[2 * (e * width + r) + 1]};
      if (entry[r].begin < 0 || entry[r].begin > entry[r].end) {
        throw InvalidArgument(text("masks.spans: span ", r, " of entry ", e, " is (", entry[r].begin, ", ",
                                   entry[r].end, "), expected 0 <= begin <= end"));
      }
      result.largest = std::max(result.largest, entry[r].end);
    }
    std::sort(entry.begin(), entry.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    for (const Span& span : entry) {
      result.lists.add(span.begin, span.end);
    }
    result.lists.close();
  }
  return result;
}

}  // namespace

Mask blocks(ConstTensorView keep, std::int64_t size) { return blocks(keep, size, size); }

Mask blocks(ConstTensorView keep, std::int64_t query_size, std::int64_t key_size) try {
  const Tensor bools = four_axes("masks.blocks: keep", keep);
  const std::int64_t heads = bools.size(1), rows = bools.size(2), columns = bools.size(3);
  check_size("masks.blocks: size", query_size, rows);
  check_size("masks.blocks: size", key_size, columns);
  const auto runs = std::make_shared<const SpanLists>(runs_of(bools));
  const std::string sizes_text = query_size == key_size ? text(query_size) : counts_text(query_size, key_size);
  const auto fill = [=](const MaskRow& row, SpanLists& spans) {
    for (const Span& run : (*runs)[list_of(row, heads, rows, row.query / query_size)]) {
      spans.add(run.begin * key_size, run.end * key_size);
    }
  };
  const auto fits = [=](std::string_view operation, MaskSizes sizes) {
    const std::int64_t query_blocks = ceil_div(sizes.queries, query_size), key_blocks = ceil_div(sizes.keys, key_size);
    if (query_blocks != rows || key_blocks != columns) {
      throw InvalidArgument(text(operation, ": blocks has ", counts_text(rows, columns), " blocks, expected ",
                                 counts_text(query_blocks, key_blocks), " of ", sizes_text, " for ", sizes.queries,
                                 " queries and ", sizes.keys, " keys"));
    }
  };
  return span_mask({.text = text("blocks(", counts_text(rows, columns), " of ", sizes_text, ")"),
                    .batch = bools.size(0),
                    .heads = heads,
                    .rows = query_size,
                    .drawn = {rows * query_size, columns * key_size}},
                   fill, fits);
} catch (...) {
  throw_own_error("masks.blocks");
}

Mask spans(const Integers& spans, std::int64_t rows) try {
  const Dims& sizes = spans.sizes();
  if (sizes.size() < 3 || sizes.size() > 5 || sizes.back() != 2) {
    throw InvalidArgument(text("masks.spans: found shape ", sizes,
                               ", expected (entries, spans, 2), with heads and batch in front or without"));
  }
  const std::int64_t entries = sizes.at(-3), width = sizes.at(-2);
  const std::int64_t heads = sizes.size() >= 4 ? sizes.at(-4) : 1, batch = sizes.size() == 5 ? sizes[0] : 1;
  check_size("masks.spans: rows", rows, entries);
  const auto given = std::make_shared<const GivenSpans>(given_spans(spans));
  const auto fill = [=](const MaskRow& row, SpanLists& lists) {
    if (width == 0) {
      return;
    }
    for (const Span& span : given->lists[list_of(row, heads, entries, row.query / rows)]) {
      lists.add(span.begin, span.end);
    }
  };
  const auto fits = [=](std::string_view operation, MaskSizes call) {
    if (ceil_div(call.queries, rows) != entries) {
      throw InvalidArgument(text(operation, ": spans has ", entries, " entries of ", rows, rows == 1 ? " row" : " rows",
                                 ", expected ", ceil_div(call.queries, rows), " for ", call.queries, " queries"));
    }
    if (given->largest > call.keys) {
      throw InvalidArgument(
          text(operation, ": spans has an end of ", given->largest, ", expected at most the ", call.keys, " keys"));
    }
  };
  return span_mask(
      {.text = text("spans(", counts_text(entries, width), rows == 1 ? "" : text(" for ", rows, " rows"), ")"),
       .batch = batch,
       .heads = heads,
       .rows = rows,
       .drawn = {entries * rows, given->largest}},
      fill, fits);
} catch (...) {
  throw_own_error("masks.spans");
}

Mask dense(ConstTensorView bools) try {
  Tensor own = four_axes("masks.dense: the array", bools);
  MaskTraits traits = bool_traits("dense", own);
  return Mask(std::make_shared<DenseMask>(std::move(traits), std::move(own)));
} catch (...) {
  throw_own_error("masks.dense");
}

Mask from_bool(ConstTensorView bools) try {
  Tensor own = four_axes("masks.from_bool: the array", bools);
  const auto runs = std::make_shared<const SpanLists>(runs_of(own));
  constexpr std::size_t span_bytes = 8;  // two i32
  if (runs->longest() * span_bytes > static_cast<std::size_t>(own.size(3))) {
    MaskTraits traits = bool_traits("from_bool", own);
    return Mask(std::make_shared<DenseMask>(std::move(traits), std::move(own)));
  }
  const std::int64_t heads = own.size(1), rows = own.size(2), columns = own.size(3);
  const auto fill = [=](const MaskRow& row, SpanLists& lists) {
    for (const Span& span : (*runs)[list_of(row, heads, rows, rows == 1 ? 0 : row.query)]) {
      lists.add(span.begin, columns == 1 ? row.sizes.keys : span.end);
    }
  };
  const auto fits = [=](std::string_view operation, MaskSizes sizes) {
    check_bools(operation, "from_bool", {rows, columns}, sizes);
  };
  return span_mask(bool_traits("from_bool", own), fill, fits);
} catch (...) {
  throw_own_error("masks.from_bool");
}

}  // namespace headway::masks

namespace headway {

void DenseMask::check(std::string_view operation, MaskSizes sizes) const {
  masks::check_bools(operation, traits.text.substr(0, traits.text.find('(')).c_str(), {bools.size(2), bools.size(3)},
                     sizes);
}

void DenseMask::append(const MaskEntries& entries, SpanLists& lists) const {
  const std::int64_t b = traits.batch == 1 ? 0 : entries.batch_item, h = traits.heads == 1 ? 0 : entries.head;
  const std::int64_t rows = bools.size(2), columns = bools.size(3);
  const auto* bytes = static_cast<const std::uint8_t*>(bools.data()) + (b * traits.heads + h) * rows * columns;
  for (std::int64_t entry = entries.begin; entry < entries.end; ++entry) {
    for_each_run(
        bytes + (rows == 1 ? 0 : entry * entries.rows) * columns, columns,
        [&](std::int64_t begin, std::int64_t end) { lists.add(begin, columns == 1 ? entries.sizes.keys : end); });
    lists.close();
  }
}

}  // namespace headway
