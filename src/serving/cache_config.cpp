// Checks of a cache's config, its memory, and the rows of a call.
#include <cmath>
#include <limits>

#include "core/elements.h"
#include "core/engine.h"
#include "serving/cache_state.h"

namespace headway {
namespace {

template <class... Parts>
[[noreturn]] void refuse_cache(const Parts&... parts) {
  throw InvalidArgument(text("KVCache: ", parts...));
}

void require_at_least(std::int64_t lowest, const char* name, std::int64_t value) {
  if (value < lowest) {
    refuse_cache("expected ", name, " of ", lowest, " or more, found ", value);
  }
}

void check_sizes(const KVCacheConfig& config) {
  require_at_least(0, "pages", config.pages);
  require_at_least(1, "page_size", config.page_size);
  require_at_least(1, "kv_heads", config.kv_heads);
  require_at_least(0, "head_dim", config.head_dim);
  require_at_least(0, "value_dim", config.value_dim.value_or(0));
  if (config.pages > std::numeric_limits<std::int32_t>::max()) {
    refuse_cache("expected fewer than 2^31 pages, found ", config.pages);
  }
  const Dims sizes{config.pages, config.page_size, config.kv_heads, config.head_dim};
  try {
    checked_elements(sizes, DType::f64);
    checked_elements({sizes[0], sizes[1], sizes[2], config.value_dim.value_or(0)}, DType::f64);
  } catch (const InvalidArgument&) {
    refuse_cache("pages of shape ", sizes, " would have more than 2^63 bytes");
  }
}

void check_types(const KVCacheConfig& config) {
  if (!is_float(config.dtype)) {
    throw TypeMismatch(text("KVCache: expected a dtype of f32, f64, bf16 or f16, found ", config.dtype));
  }
  if (config.quantize != CacheFormat::plain && config.dtype == DType::f64) {
    throw TypeMismatch("KVCache: quantised pages take f32, bf16 or f16, found f64");
  }
}

void check_device(const KVCacheConfig& config) {
  if (config.device == Device{}) {
    return;
  }
  if (const auto reason = cuda_engine().unavailable()) {
    throw Unsupported(text("KVCache: the pages are to be on ", config.device, ", and the cuda engine says: ", *reason));
  }
}

void check_window(const KVCacheConfig& config) {
  require_at_least(0, "first", config.first);
  require_at_least(0, "slack", config.slack);
  if (!config.window) {
    if (config.first > 0 || config.slack > 0) {
      refuse_cache("first ", config.first, " and slack ", config.slack, " need a window, found none");
    }
    return;
  }
  for (const auto& side : {config.window->left, config.window->right}) {
    if (side && *side < 0) {
      refuse_cache("expected a window of 0 or more to each side, or None for unlimited, found ", *side);
    }
  }
}

KVCacheConfig with_values(KVCacheConfig config) {
  if (!config.value_in_key) {
    config.value_dim = config.value_dim.value_or(config.head_dim);
    return config;
  }
  const std::int64_t inside = *config.value_in_key;
  if (inside < 0 || inside > config.head_dim) {
    refuse_cache("expected value_in_key of 0 to the head_dim ", config.head_dim, ", found ", inside);
  }
  if (config.value_dim.value_or(inside) != inside) {
    refuse_cache("value_dim is ", *config.value_dim, ", value_in_key ", inside, ": give one of them");
  }
  if (config.rope && config.rope->dims.value_or(config.head_dim) > 0 && inside > 0) {
    refuse_cache("rope rotates the first numbers of a key, which value_in_key makes values: rotate keys before append");
  }
  config.value_dim = inside;
  return config;
}

}  // namespace

const char* name(CacheFormat format) {
  switch (format) {
    case CacheFormat::plain: return "plain";
    case CacheFormat::int8: return "int8";
    case CacheFormat::fp8: return "fp8";
  }
  return "unknown";
}

KVCacheConfig resolved(const KVCacheConfig& given) {
  check_sizes(given);
  check_types(given);
  check_device(given);
  check_window(given);
  KVCacheConfig config = with_values(given);
  if (config.rope) {
    if (config.rope->scaling == RopeScaling::dynamic) {
      refuse_cache(
          "dynamic rope scaling depends on the length of the text, and keys are rotated once: expected another");
    }
    config.rope->dims = RopePairs("KVCache", config.head_dim, *config.rope).dims();
  }
  return config;
}

DType page_type(const KVCacheConfig& config) {
  switch (config.quantize) {
    case CacheFormat::int8: return DType::i8;
    case CacheFormat::fp8: return DType::f8e4m3;
    case CacheFormat::plain: break;
  }
  return config.dtype;
}

PageStore::PageStore(const KVCacheConfig& config, std::int64_t width)
    : data(Tensor::uninitialized({config.pages, config.page_size, config.kv_heads, width}, page_type(config),
                                 config.device)) {
  if (config.quantize != CacheFormat::plain) {
    scales = Tensor::uninitialized({config.pages, config.page_size, config.kv_heads}, DType::f32, config.device);
  }
}

CacheState::CacheState(const KVCacheConfig& checked)
    : config(checked),
      key(config, config.head_dim),
      value(config.value_in_key ? std::nullopt : std::optional<PageStore>(std::in_place, config, *config.value_dim)),
      book(config.pages, config.page_size,
           {.left = config.window ? config.window->left : std::nullopt, .first = config.first, .slack = config.slack}) {
  if (config.rope) {
    rope.emplace("KVCache", config.head_dim, *config.rope);
  }
}

void check_cached_rows(std::string_view operation, const char* name, ConstTensorView view,
                       const KVCacheConfig& config) {
  if (view.dtype() != config.dtype) {
    throw TypeMismatch(text(operation, ": ", name, " has type ", view.dtype(), ", the cache has ", config.dtype));
  }
  if (view.device() != config.device) {
    throw InvalidArgument(text(operation, ": ", name, " is on ", view.device(), ", the cache is on ", config.device));
  }
  if (reinterpret_cast<std::uintptr_t>(view.data()) % size_of(view.dtype()) != 0) {
    throw InvalidArgument(text(operation, ": ", name, " must be aligned to its element's ", size_of(view.dtype()),
                               " bytes, found address ", view.data()));
  }
}

RowCounts count_rows(std::string_view operation, std::size_t sequences, std::int64_t rows,
                     const std::optional<ConstTensorView>& cu_seqlens) {
  RowCounts result;
  if (!cu_seqlens) {
    result.counts.assign(sequences, rows);
    return result;
  }
  result.packed = true;
  if (!is_integer(cu_seqlens->dtype())) {
    throw TypeMismatch(text(operation, ": cu_seqlens has type ", cu_seqlens->dtype(), ", expected i32 or i64"));
  }
  if (cu_seqlens->device() != Device{}) {
    throw InvalidArgument(text(operation, ": expected cu_seqlens in host memory, found ", cu_seqlens->device()));
  }
  const Dims expected{static_cast<std::int64_t>(sequences) + 1};
  if (cu_seqlens->sizes() != expected) {
    throw InvalidArgument(text(operation, ": cu_seqlens has shape ", cu_seqlens->sizes(), ", expected ", expected,
                               ": one more than sequences"));
  }
  std::int64_t last = 0;
  for (std::size_t b = 0; b <= sequences; ++b) {
    const std::int64_t bound = load_integer(*cu_seqlens, static_cast<std::int64_t>(b) * cu_seqlens->stride(0));
    const bool ends = b == sequences && bound != rows, begins = b == 0 && bound != 0;
    if (begins || ends || bound < last) {
      throw InvalidArgument(text(operation, ": cu_seqlens[", b, "] is ", bound, ", expected numbers that go up from 0 ",
                                 "to the ", rows, " rows"));
    }
    if (b > 0) {
      result.begins.push_back(last);
      result.counts.push_back(bound - last);
    }
    last = bound;
  }
  return result;
}

}  // namespace headway
