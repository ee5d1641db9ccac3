// cuBLASLt's matrices are column by column, so what it computes is d^T = b^T a^T: its A is our b, its B our a, and
// the bias runs along the rows of its D. A matrix of ours that lies row by row is one of its own, transposed already.
#include "engines/cuda/matmul.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "engines/cuda/cublas_lt.h"
#include "engines/cuda/device.h"
#include "engines/cuda/memory.h"

namespace headway::cuda {
namespace {

constexpr std::uint64_t most_workspace = std::uint64_t{32} << 20;

// A matrix as cuBLASLt sees our transposed one: columns of `rows` elements.
struct ColumnMajor {
  std::int64_t rows = 0, columns = 0, leading = 0;
  bool transpose = false;  // it has to be transposed to be the one that is meant
};

std::optional<ColumnMajor> column_major(const FlatMatrix& matrix) {
  // Where an axis has one element its stride says nothing.
  const std::int64_t row = matrix.rows == 1 ? std::max(matrix.columns, matrix.row) : matrix.row;
  if ((matrix.column == 1 || matrix.columns == 1) && row >= matrix.columns) {
    return ColumnMajor{matrix.columns, matrix.rows, row, false};
  }
  const std::int64_t column = matrix.columns == 1 ? std::max(matrix.rows, matrix.column) : matrix.column;
  if ((matrix.row == 1 || matrix.rows == 1) && column >= matrix.rows) {
    return ColumnMajor{matrix.rows, matrix.columns, column, true};
  }
  return std::nullopt;
}

std::uint32_t alignment(const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  return address == 0 ? 256 : static_cast<std::uint32_t>(std::min<std::uintptr_t>(address & (~address + 1), 256));
}

cudaDataType_t cuda_type(DType dtype) {
  switch (dtype) {
    case DType::f64: return CUDA_R_64F;
    case DType::bf16: return CUDA_R_16BF;
    case DType::f16: return CUDA_R_16F;
    default: return CUDA_R_32F;
  }
}

// The library's objects for one product.
class Descriptions {
 public:
  Descriptions(const Matmul& call, const ColumnMajor& a, const ColumnMajor& b, const ColumnMajor& d)
      : library_(lt::library(call.operation)), operation_(call.operation) {
    const bool wide = call.dtype == DType::f64;
    lt::MatmulDescription made = nullptr;
    check(library_.cublasLtMatmulDescCreate(&made, wide ? lt::Compute::f64 : lt::Compute::f32,
                                            wide ? CUDA_R_64F : CUDA_R_32F));
    product = {made, library_.cublasLtMatmulDescDestroy};
    set(lt::MatmulAttribute::transpose_a, std::int32_t{b.transpose});
    set(lt::MatmulAttribute::transpose_b, std::int32_t{a.transpose});
    if (call.bias != nullptr) {
      set(lt::MatmulAttribute::epilogue, lt::Epilogue::bias);
      set(lt::MatmulAttribute::bias_pointer, call.bias);
    }
    layout_a = layout(b, call.dtype);
    layout_b = layout(a, call.dtype);
    layout_d = layout(d, call.dtype);
  }

  std::optional<lt::Heuristic> best(const Matmul& call) const {
    lt::Preference made = nullptr;
    check(library_.cublasLtMatmulPreferenceCreate(&made));
    const Owned<lt::Preference> preference{made, library_.cublasLtMatmulPreferenceDestroy};
    const auto prefer = [&](lt::PreferenceAttribute attribute, auto value) {
      check(library_.cublasLtMatmulPreferenceSetAttribute(made, attribute, &value, sizeof(value)));
    };
    prefer(lt::PreferenceAttribute::most_workspace, most_workspace);
    prefer(lt::PreferenceAttribute::reduction_schemes, lt::reduce_in_compute_type);
    prefer(lt::PreferenceAttribute::alignment_a, alignment(call.b.data));
    prefer(lt::PreferenceAttribute::alignment_b, alignment(call.a.data));
    prefer(lt::PreferenceAttribute::alignment_c, alignment(call.d.data));
    prefer(lt::PreferenceAttribute::alignment_d, alignment(call.d.data));
    lt::Heuristic found{};
    int count = 0;
    const lt::Status status = library_.cublasLtMatmulAlgoGetHeuristic(
        lt::handle(call.device, operation_), product.get(), layout_a.get(), layout_b.get(), layout_d.get(),
        layout_d.get(), made, 1, &found, &count);
    return status == 0 && count > 0 && found.status == 0 ? std::optional(found) : std::nullopt;
  }

  void run(const Matmul& call, const lt::Heuristic& way, bool add_to_d) const {
    const Workspace workspace(way.workspace_bytes, call.device, call.stream, operation_);
    const double wide[] = {1.0, add_to_d ? 1.0 : 0.0};
    const float narrow[] = {1.0F, add_to_d ? 1.0F : 0.0F};
    const void* alpha = call.dtype == DType::f64 ? static_cast<const void*>(wide) : narrow;
    const void* beta = call.dtype == DType::f64 ? static_cast<const void*>(wide + 1) : narrow + 1;
    lt::check(
        library_.cublasLtMatmul(lt::handle(call.device, operation_), product.get(), alpha, call.b.data, layout_a.get(),
                                call.a.data, layout_b.get(), beta, call.d.data, layout_d.get(), call.d.data,
                                layout_d.get(), &way.algorithm, workspace.data(), way.workspace_bytes, call.stream),
        operation_, "multiplying matrices");
  }

 private:
  template <class Object>
  using Owned = std::unique_ptr<std::remove_pointer_t<Object>, lt::Status (*)(Object)>;
  static lt::Status nothing(lt::MatmulDescription) { return 0; }
  static lt::Status no_layout(lt::Layout) { return 0; }

  void check(lt::Status status) const { lt::check(status, operation_, "describing a product"); }

  template <class Value>
  void set(lt::MatmulAttribute attribute, Value value) {
    check(library_.cublasLtMatmulDescSetAttribute(product.get(), attribute, &value, sizeof(value)));
  }

  Owned<lt::Layout> layout(const ColumnMajor& matrix, DType dtype) const {
    lt::Layout made = nullptr;
    check(library_.cublasLtMatrixLayoutCreate(&made, cuda_type(dtype), static_cast<std::uint64_t>(matrix.rows),
                                              static_cast<std::uint64_t>(matrix.columns), matrix.leading));
    return {made, library_.cublasLtMatrixLayoutDestroy};
  }

  const lt::Library& library_;
  std::string_view operation_;
  Owned<lt::MatmulDescription> product{nullptr, nothing};
  Owned<lt::Layout> layout_a{nullptr, no_layout}, layout_b{nullptr, no_layout}, layout_d{nullptr, no_layout};
};

// What a way may depend on.
using Key = std::array<std::int64_t, 16>;

std::optional<lt::Heuristic> way_for(const Key& key, const Descriptions& descriptions, const Matmul& call) {
  static std::mutex& mutex = *new std::mutex;
  static std::map<Key, std::optional<lt::Heuristic>>& known = *new std::map<Key, std::optional<lt::Heuristic>>;
  const std::lock_guard lock(mutex);
  const auto found = known.find(key);
  return found != known.end() ? found->second : known[key] = descriptions.best(call);
}

bool try_matmul(const Matmul& call, bool add_to_d) {
  const auto a = column_major(call.a), b = column_major(call.b), d = column_major(call.d);
  constexpr std::int64_t longest = (std::int64_t{1} << 31) - 1;
  const bool small = std::max({call.a.rows, call.a.columns, call.d.columns}) <= longest;
  if (!a || !b || !d || d->transpose || !small) {
    return false;
  }
  const Key key = {call.device,
                   static_cast<std::int64_t>(call.dtype),
                   call.a.rows,
                   call.a.columns,
                   call.d.columns,
                   a->leading,
                   b->leading,
                   d->leading,
                   a->transpose,
                   b->transpose,
                   call.bias != nullptr,
                   alignment(call.a.data),
                   alignment(call.b.data),
                   alignment(call.d.data),
                   alignment(call.bias),
                   add_to_d};
  const Descriptions descriptions(call, *a, *b, *d);
  const std::optional<lt::Heuristic> way = way_for(key, descriptions, call);
  if (way) {
    descriptions.run(call, *way, add_to_d);
  }
  return way.has_value();
}

}  // namespace

bool matmul(const Matmul& call) {
  if (try_matmul(call, false)) {
    return true;
  }
  if (call.bias == nullptr) {
    return false;
  }
  // No way with the bias at the end: it goes to d before, and the product is added to it.
  Matmul rest = call;
  rest.bias = nullptr;
  const FlatMatrix& d = call.d;
  const Dims sizes{d.rows, d.columns};
  const Device device{DeviceType::cuda, call.device};
  if (!column_major(call.a) || !column_major(call.b) || !column_major(d) || column_major(d)->transpose) {
    return false;
  }
  queue_strided_copy(ConstTensorView(call.bias, call.dtype, sizes, Dims{0, 1}, device),
                     TensorView(d.data, call.dtype, sizes, Dims{d.row, d.column}, device), call.stream, call.operation);
  return try_matmul(rest, true);
}

}  // namespace headway::cuda
