// Keys and values in pages: every check on them, and their place in a Problem.
#include <algorithm>

#include "core/ceil_div.h"
#include "core/elements.h"
#include "core/validate_inputs.h"

namespace headway {
namespace {

void check_options(const Problem& problem, const AttentionOptions& options) {
  const auto refuse = [&](const char* name) {
    invalid(problem, "keys in pages take no ", name, ", found one; attention takes it, on gathered keys and values");
  };
  if (options.mask) {
    refuse("mask");
  }
  if (options.bias) {
    refuse("bias");
  }
  if (options.dropout != 0) {
    refuse("dropout");
  }
}

// Pages hold the query's type, or 8-bit numbers with a scale for each row.
void check_page_types(const Problem& problem, const PagedKeys& keys) {
  check_float(problem, "query", problem.query);
  check_storage(problem, "query", problem.query);
  check_storage(problem, "key_pages", keys.key_pages);
  check_storage(problem, "value_pages", keys.value_pages);
  const DType type = keys.key_pages.dtype();
  if (keys.value_pages.dtype() != type) {
    mismatch(problem, "value_pages has type ", keys.value_pages.dtype(), ", key_pages has ", type);
  }
  const bool scales = keys.key_scales || keys.value_scales;
  if (!is_8bit(type)) {
    if (type != problem.dtype()) {
      mismatch(problem, "key_pages has type ", type, ", expected the query's ", problem.dtype(),
               ", or i8 or f8e4m3 with scales");
    }
    if (scales) {
      invalid(problem, "scales belong to pages of i8 or f8e4m3, found pages of ", type);
    }
    return;
  }
  if (problem.dtype() == DType::f64) {
    mismatch(problem, "query has type f64, expected f32, bf16 or f16 for pages of ", type);
  }
  if (!keys.key_scales || !keys.value_scales) {
    invalid(problem, "pages of ", type, " need key_scales and value_scales, found ",
            scales ? "one of them" : "neither");
  }
}

ConstTensorView checked_scales(const Problem& problem, const char* name, ConstTensorView scales,
                               const Dims& page_sizes) {
  if (scales.dtype() != DType::f32) {
    mismatch(problem, name, " has type ", scales.dtype(), ", expected f32");
  }
  check_storage(problem, name, scales);
  check_sizes(problem, name, scales, {page_sizes[0], page_sizes[1], page_sizes[2]});
  return scales.transpose(1, 2);
}

void check_page_sizes(const Problem& problem, const PagedKeys& keys) {
  const Dims &key = keys.key_pages.sizes(), &value = keys.value_pages.sizes();
  for (const auto& [name, sizes] : {std::pair{"key_pages", key}, {"value_pages", value}}) {
    if (sizes.size() != 4) {
      invalid(problem, name, " must have 4 axes [pages, page_size, heads, head_dim], found shape ", sizes);
    }
  }
  for (int axis = 0; axis < 3; ++axis) {
    if (key[axis] != value[axis]) {
      invalid(problem, "value_pages has shape ", value, ", key_pages has ", key,
              ": expected the same pages, page_size and heads");
    }
  }
  if (key[1] < 1) {
    invalid(problem, "pages must have 1 or more slots, found key_pages of shape ", key);
  }
}

// The longest sequence that a row of the table has pages for.
std::int64_t most_keys(const Pages& pages) {
  std::int64_t most = 0;
  const bool too_many = __builtin_mul_overflow(pages.table.size(1), pages.size, &most);
  return too_many ? longest_axis : std::min(most, longest_axis);
}

// The first of a row's entries that names no page, or `entries`. Called for every sequence of every call: no branch in
// the usual loop.
template <class Integer>
std::int64_t first_bad(const Integer* row, std::int64_t stride, std::int64_t entries, std::int64_t pages) {
  bool bad = false;
  for (std::int64_t n = 0; n < entries; ++n) {
    bad |= static_cast<std::uint64_t>(std::int64_t{row[n * stride]}) >= static_cast<std::uint64_t>(pages);
  }
  std::int64_t n = bad ? 0 : entries;
  while (n < entries && row[n * stride] >= 0 && row[n * stride] < pages) {
    ++n;
  }
  return n;
}

std::int64_t first_bad(const ConstTensorView& table, std::int64_t b, std::int64_t entries, std::int64_t pages) {
  const std::int64_t begin = b * table.stride(0), stride = table.stride(1);
  return table.dtype() == DType::i32
             ? first_bad(static_cast<const std::int32_t*>(table.data()) + begin, stride, entries, pages)
             : first_bad(static_cast<const std::int64_t*>(table.data()) + begin, stride, entries, pages);
}

// Every length, and every page that it needs; entries behind those are not read. A table on a device is not read here.
void check_table(const Problem& problem) {
  const Pages& pages = *problem.pages;
  const ConstTensorView &table = pages.table, &lengths = pages.lengths;
  const std::int64_t most = most_keys(pages);
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const std::int64_t length = load_integer(lengths, b * lengths.stride(0));
    if (length < 0 || length > most) {
      invalid(problem, "lengths[", b, "] is ", length, ", expected 0 to ", most, " (", table.size(1), " pages of ",
              pages.size, ")");
    }
    if (!on_host(table)) {
      continue;
    }
    const std::int64_t entries = ceil_div(length, pages.size), n = first_bad(table, b, entries, problem.key.size(0));
    if (n < entries) {
      invalid(problem, "block_table[", b, ", ", n, "] is ",
              load_integer(table, b * table.stride(0) + n * table.stride(1)), ", expected 0 to ",
              problem.key.size(0) - 1);
    }
  }
}

std::int64_t longest_sequence(const Pages& pages) {
  if (!on_host(pages.lengths)) {
    return most_keys(pages);
  }
  std::int64_t longest = 0;
  for (std::int64_t b = 0; b < pages.lengths.size(0); ++b) {
    longest = std::max(longest, load_integer(pages.lengths, b * pages.lengths.stride(0)));
  }
  return longest;
}

// Where the queries lie: [B,H,Sq,D], or packed [total,H,D].
Layout place_queries(Problem& problem, const Call& call) {
  Layout layout;
  layout.packed = call.cu_seqlens_q.has_value();
  if (call.query.rank() != (layout.packed ? 3 : 4)) {
    invalid(problem, "query must have ",
            layout.packed ? "3 axes [total, heads, head_dim]" : "4 axes [batch, heads, length, head_dim]",
            ", found shape ", call.query.sizes());
  }
  if (layout.packed) {
    const Packing packing = check_cu_seqlens(problem, "cu_seqlens_q", *call.cu_seqlens_q, call.query.size(0));
    layout.rank = 3;
    layout.batch = packing.sequences;
    problem.cu_seqlens_q = call.cu_seqlens_q;
    problem.query_len = packing.longest;
  } else {
    layout.batch = call.query.size(0);
    problem.query_len = call.query.size(2);
  }
  problem.batch = layout.batch;
  problem.query = layout.rows(call.query);
  return layout;
}

}  // namespace

Layout place_paged(Problem& problem, const Call& call) {
  const PagedKeys& keys = *call.pages;
  check_options(problem, call.options);
  check_page_types(problem, keys);
  check_page_sizes(problem, keys);
  const Layout layout = place_queries(problem, call);
  problem.key = keys.key_pages.transpose(1, 2);
  problem.value = keys.value_pages.transpose(1, 2);
  problem.heads = problem.query.size(1);
  problem.kv_heads = problem.key.size(1);
  problem.head_dim = problem.query.size(3);
  problem.value_dim = problem.value.size(3);
  check_axes(problem);
  check_heads(problem);
  if (problem.key.size(3) != problem.head_dim) {
    invalid(problem, "key_pages has head_dim ", problem.key.size(3), ", query has ", problem.head_dim);
  }
  check_integers(problem, "block_table", keys.block_table);
  check_integers(problem, "lengths", keys.lengths);
  check_sizes(problem, "lengths", keys.lengths, {problem.batch});
  if (keys.block_table.rank() != 2 || keys.block_table.size(0) != problem.batch) {
    invalid(problem, "block_table has shape ", keys.block_table.sizes(), ", expected (", problem.batch,
            ", pages of a sequence)");
  }
  Pages& pages = problem.pages.emplace();
  pages.size = keys.key_pages.size(1);
  pages.table = keys.block_table;
  pages.lengths = keys.lengths;
  if (keys.key_scales) {
    pages.key_scales = checked_scales(problem, "key_scales", *keys.key_scales, keys.key_pages.sizes());
    pages.value_scales = checked_scales(problem, "value_scales", *keys.value_scales, keys.value_pages.sizes());
  }
  if (on_host(pages.lengths)) {
    check_table(problem);
  }
  problem.key_len = problem.key.size(0) > 0 ? longest_sequence(pages) : 0;
  return layout;
}

}  // namespace headway
