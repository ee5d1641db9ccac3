#include "engines/cuda/arguments.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "core/ceil_div.h"
#include "core/elements.h"
#include "core/key_range.h"
#include "core/text.h"
#include "engines/cuda/device.h"
#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/problem_arguments.h"
#include "engines/cuda/spans.h"
#include "engines/cuda/upload.h"

namespace headway::cuda {
namespace {

// Whether whole 16-byte chunks of each row may be copied: features side by side, every row's beginning aligned.
bool in_chunks(const ConstTensorView& view) {
  const auto element = static_cast<std::int64_t>(size_of(view.dtype()));
  if (view.stride(3) != 1 || reinterpret_cast<std::uintptr_t>(view.data()) % 16 != 0) {
    return false;
  }
  for (int axis = 0; axis < 3; ++axis) {
    if (view.size(axis) > 1 && view.stride(axis) * element % 16 != 0) {
      return false;
    }
  }
  return true;
}

void* address(const ConstTensorView& view) { return const_cast<void*>(view.data()); }

Matrix matrix_or_none(const std::optional<ConstTensorView>& view) { return view ? matrix_of(*view) : Matrix{}; }

PerHead per_head_or_none(const std::optional<ConstTensorView>& view) {
  return view ? PerHead{address(*view), view->stride(0), view->dtype()} : PerHead{};
}

// Kernels for all types but f64 take the cap as f32, where it must not become 0 (that would be none) or infinite. A
// score below the smallest normal one changes no weight, and a cap beyond the largest no score.
double softcap_in(DType dtype, double softcap) {
  using Limits = std::numeric_limits<float>;
  return dtype == DType::f64 ? softcap : std::clamp<double>(softcap, Limits::min(), Limits::max());
}

bool in_host_memory(const std::optional<ConstTensorView>& lengths) { return lengths && lengths->device() == Device{}; }

// [B,Sq]; not [B] that is only seen as that, by a stride of 0.
bool is_per_row(const ConstTensorView& lengths) { return lengths.rank() == 2 && lengths.stride(1) != 0; }

// How many entries a kernel may read: all of [B] or [B+1], also where there is no row, and of [B,Sq].
std::size_t entries(const ConstTensorView& lengths) {
  return static_cast<std::size_t>(is_per_row(lengths) ? lengths.elements() : lengths.size(0));
}

std::vector<std::int64_t> values_of(const ConstTensorView& lengths) {
  std::vector<std::int64_t> values;
  const std::int64_t rows = is_per_row(lengths) ? lengths.size(1) : 1;
  values.reserve(entries(lengths));
  for (std::int64_t b = 0; b < lengths.size(0); ++b) {
    for (std::int64_t i = 0; i < rows; ++i) {
      values.push_back(load_integer(lengths, b * lengths.stride(0) + (rows > 1 ? i * lengths.stride(1) : 0)));
    }
  }
  return values;
}

PageScales scales_of(const std::optional<ConstTensorView>& scales) {
  return scales ? PageScales{static_cast<const float*>(scales->data()), scales->stride(0), scales->stride(1),
                             scales->stride(2)}
                : PageScales{};
}

// Everything but the table and the lengths.
PageArguments pages_of(const Problem& problem) {
  PageArguments result;
  constexpr std::int64_t most = std::numeric_limits<int>::max();
  result.size = static_cast<int>(std::min(problem.pages->size, most));
  const auto size = static_cast<std::uint32_t>(std::max(result.size, 1));
  result.size_shift = std::bit_width(size - 1);
  const std::uint64_t power = std::uint64_t{1} << result.size_shift;
  result.size_factor = static_cast<std::uint32_t>(((power - size) << 32) / size + 1);
  result.count = static_cast<int>(problem.key.size(0));
  result.key_scales = scales_of(problem.pages->key_scales);
  result.value_scales = scales_of(problem.pages->value_scales);
  return result;
}

// Table entries of a sequence that a call may read.
std::int64_t table_entries(const Problem& problem) { return ceil_div(problem.key_len, problem.pages->size); }

// Of a table in host memory: upload sends words of two entries.
std::size_t table_words(const Problem& problem) {
  return static_cast<std::size_t>(ceil_div(problem.batch * table_entries(problem), 2));
}

// Entries behind a sequence's pages may be anything: they are cut as all are.
template <class Integer>
void cut_row(const Integer* row, std::int64_t stride, std::int64_t entries, std::int64_t last, std::int32_t* to) {
  for (std::int64_t n = 0; n < entries; ++n) {
    to[n] = static_cast<std::int32_t>(std::clamp<std::int64_t>(row[n * stride], 0, last));
  }
}

std::vector<std::int32_t> cut_table(const Problem& problem) {
  const ConstTensorView& table = problem.pages->table;
  const std::int64_t entries = table_entries(problem), last = std::max<std::int64_t>(problem.key.size(0) - 1, 0);
  std::vector<std::int32_t> result(2 * table_words(problem));
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const std::int64_t begin = b * table.stride(0), stride = table.stride(1);
    std::int32_t* to = result.data() + b * entries;
    if (table.dtype() == DType::i32) {
      cut_row(static_cast<const std::int32_t*>(table.data()) + begin, stride, entries, last, to);
    } else {
      cut_row(static_cast<const std::int64_t*>(table.data()) + begin, stride, entries, last, to);
    }
  }
  return result;
}

void place_table(const Problem& problem, PageArguments& pages, Workspace& workspace, cudaStream_t stream) {
  const ConstTensorView& table = problem.pages->table;
  if (table.device() != Device{}) {
    const std::int64_t words = table.dtype() == DType::i64 ? 2 : 1;
    pages.table = static_cast<const std::int32_t*>(table.data());
    pages.sequence_step = table.stride(0) * words;
    pages.entry_step = table.stride(1) * words;
    return;
  }
  const std::vector<std::int32_t> entries = cut_table(problem);
  auto* target = workspace.take_as<std::int32_t>(entries.size());
  check(upload(entries.data(), entries.size(), target, stream), problem.operation, "sending the block table");
  pages.table = target;
  pages.sequence_step = table_entries(problem);
  pages.entry_step = 1;
}

}  // namespace

Rows rows_of(const ConstTensorView& view) {
  return {address(view), view.stride(0), view.stride(1), view.stride(2), view.stride(3), in_chunks(view)};
}

Rows row_values_of(const ConstTensorView& view) {
  return {address(view), view.stride(0), view.stride(1), view.stride(2), 0, false};
}

Matrix matrix_of(const ConstTensorView& view) {
  return {address(view), view.stride(0), view.stride(1), view.stride(2), view.stride(3), view.dtype()};
}

const DeviceProperties& device_of(const Problem& problem) { return device_properties(problem.query.device().index); }

bool is_half_type(DType dtype) { return dtype == DType::bf16 || dtype == DType::f16; }

std::optional<std::string> extreme_scale(const Problem& problem) {
  const bool wide = problem.dtype() == DType::f64;
  const double size = std::abs(problem.scale), limit = wide ? 1e150 : 1e20;
  if (size > limit || size < 1 / limit) {
    return text("scale ", problem.scale, " is extreme");
  }
  if (!wide && problem.softcap && *problem.softcap < std::numeric_limits<float>::min()) {
    return text("softcap ", *problem.softcap, " is extreme");
  }
  return std::nullopt;
}

std::optional<std::string> tensor_core_refusal(const Problem& problem) {
  if (!is_half_type(problem.dtype())) {
    return "neither bf16 nor f16";
  }
  if (problem.key_dtype() != problem.dtype()) {
    return "8-bit keys";
  }
  if (std::max(problem.head_dim, problem.value_dim) > mma_widest) {
    return text("head_dim ", problem.head_dim, " and value_dim ", problem.value_dim, ", expected at most ", mma_widest);
  }
  return std::nullopt;
}

std::optional<std::string> split_refusal(const Problem& problem) {
  const DeviceProperties& device = device_of(problem);
  if (problem.dtype() != DType::f32) {
    return "not f32";
  }
  if (device.minor != 0) {
    return text("six tensor core products are not faster than an exact one on compute capability ", device.major, ".",
                device.minor);
  }
  if (std::max(problem.head_dim, problem.value_dim) > mma_widest) {
    return text("head_dim ", problem.head_dim, " and value_dim ", problem.value_dim, ", expected at most ", mma_widest);
  }
  constexpr double most_scale = 0x1p32;  // kernels/split_tile.cuh
  if (std::abs(problem.scale) > most_scale) {
    return text("scale ", problem.scale, " is extreme");
  }
  return extreme_scale(problem);
}

std::optional<std::string> hopper_chip_refusal(const Problem& problem) {
  const DeviceProperties& device = device_of(problem);
  return device.major == 9 ? std::optional<std::string>()
                           : text("compute capability ", device.major, ".", device.minor, ", expected 9.0");
}

std::optional<std::string> hopper_split_refusal(const Problem& problem) {
  if (auto reason = hopper_chip_refusal(problem)) {
    return reason;
  }
  return split_refusal(problem);
}

Arguments arguments_of(const Problem& problem) {
  Arguments result{};
  result.batch = problem.batch;
  result.heads = problem.heads;
  result.kv_heads = problem.kv_heads;
  result.group = problem.kv_heads > 0 ? problem.heads / problem.kv_heads : 1;
  result.query_len = problem.query_len;
  result.key_len = problem.key_len;
  result.total_queries = problem.query.size(2);
  result.total_keys = problem.key.size(2);
  result.head_dim = problem.head_dim;
  result.value_dim = problem.value_dim;
  result.query = rows_of(problem.query);
  result.key = rows_of(problem.key);
  result.value = rows_of(problem.value);
  if (problem.pages) {
    result.pages = pages_of(problem);
  }
  result.rule = range_rule(problem);
  result.valid_lens_per_batch = problem.valid_lens_per_batch;
  result.scale = problem.scale;
  result.softcap = problem.softcap ? softcap_in(problem.dtype(), *problem.softcap) : 0.0;
  result.bias = matrix_or_none(problem.bias);
  result.mask = matrix_or_none(problem.mask);
  result.slopes = per_head_or_none(problem.alibi_slopes);
  result.sinks = per_head_or_none(problem.sinks);
  result.dropout = {Philox4x32::schedule(problem.dropout.seed), problem.dropout.threshold, problem.dropout.kept_scale,
                    problem.dropout.active()};
  return result;
}

std::size_t lengths_bytes(const Problem& problem) {
  std::size_t bytes = spans_bytes(problem);
  const auto add = [&](const std::optional<ConstTensorView>& lengths) {
    if (in_host_memory(lengths)) {
      bytes += Workspace::rounded(sizeof(std::int64_t) * entries(*lengths));
    }
  };
  add(problem.cu_seqlens_q);
  add(problem.cu_seqlens_k);
  add(problem.valid_lens);
  add(problem.query_lens);
  if (problem.pages) {
    add(problem.pages->lengths);
    if (in_host_memory(problem.pages->table)) {
      bytes += Workspace::rounded(sizeof(std::int64_t) * table_words(problem));
    }
  }
  return bytes;
}

void place_lengths(const Problem& problem, Arguments& arguments, Workspace& workspace, cudaStream_t stream) {
  const auto place = [&](const std::optional<ConstTensorView>& lengths, Lengths& placed) {
    if (!lengths) {
      return;
    }
    const bool per_row = is_per_row(*lengths);
    if (!in_host_memory(lengths)) {
      placed = {lengths->data(), lengths->stride(0), per_row ? lengths->stride(1) : 0, lengths->dtype() == DType::i64};
      return;
    }
    const std::vector<std::int64_t> values = values_of(*lengths);
    auto* target = workspace.take_as<std::int64_t>(entries(*lengths));
    check(upload(values.data(), values.size(), target, stream), problem.operation, "sending the lengths");
    placed = {target, per_row ? lengths->size(1) : 1, per_row ? 1 : 0, true};
  };
  place(problem.cu_seqlens_q, arguments.cu_seqlens_q);
  place(problem.cu_seqlens_k, arguments.cu_seqlens_k);
  place(problem.valid_lens, arguments.valid_lens);
  place(problem.query_lens, arguments.query_lens);
  place_spans(problem, arguments, workspace, stream);
  if (problem.pages) {
    place(problem.pages->lengths, arguments.pages.lengths);
    place_table(problem, arguments.pages, workspace, stream);
  }
}

}  // namespace headway::cuda
