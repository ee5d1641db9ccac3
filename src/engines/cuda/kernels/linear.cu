// What a layer's projections need beside cuBLASLt: products in exact arithmetic over any layout, the repair of
// gradients that hold a NaN, and sums of columns.
#include "engines/cuda/elements.cuh"
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/linear_kernels.h"

namespace headway::cuda {
namespace {

constexpr int threads = 256;

template <class T>
__device__ inline T* element_of(const LinearMatrix& matrix, std::int64_t r, std::int64_t c) {
  const std::int64_t outer = r < matrix.inner ? 0 : r / matrix.inner;
  return static_cast<T*>(matrix.data) + outer * matrix.outer + (r - outer * matrix.inner) * matrix.row +
         c * matrix.column;
}

template <class T>
__device__ inline bool is_nan(T value) {
  const auto real = number<RealOf<T>>(value);
  return real != real;
}

// ---- Products ----

constexpr int tile = 64, depth_step = 16, each = 4;  // a thread has 4 x 4 of a tile's 64 x 64

// A block of threads owns a tile and takes the depth 16 at a time: each step's products are summed on their own before
// they join the rest, k ascending. Elements of a and b are read once for 64 of the result's, one by one: any layout
// will do, and reading is what bounds it. A repair reads the result, and ends there unless it holds a NaN.
template <class T>
class ProductTile {
 public:
  using Real = RealOf<T>;
  struct Shared {
    Real a[depth_step][tile], b[depth_step][tile];
    bool counted[depth_step];  // for a repair: rows of b that are not all 0
  };

  __device__ ProductTile(const ProductArguments& args, Shared& shared, std::int64_t first_row,
                         std::int64_t first_column)
      : args_(args), shared_(shared), first_row_(first_row), first_column_(first_column) {}

  __device__ void run() {
    if (args_.repair && !holds_nan()) {
      return;
    }
    for (std::int64_t step = 0; step < args_.depth; step += depth_step) {
      __syncthreads();  // the step before has been read
      if (args_.repair) {
        find_counted(step);
      }
      load(step);
      __syncthreads();
      multiply();
    }
    store();
  }

 private:
  // For all threads alike.
  __device__ bool holds_nan() const {
    const T* product = static_cast<const T*>(args_.product.data);
    bool found = false;
#pragma unroll
    for (int x = 0; x < tile * tile / threads; ++x) {
      const int at = static_cast<int>(threadIdx.x) + x * threads;
      const std::int64_t row = first_row_ + at / tile, column = first_column_ + at % tile;
      const bool inside = row < args_.rows && column < args_.columns;
      // Weights have one axis of rows.
      found |= is_nan(inside ? product[row * args_.product.row + column * args_.product.column] : T{});
    }
    return __syncthreads_or(found) != 0;
  }

  // A warp has every eighth row of the step.
  __device__ void find_counted(std::int64_t step) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    for (int k = warp; k < depth_step && step + k < args_.depth; k += threads / 32) {
      bool any = false;
      for (std::int64_t n = lane; n < args_.columns; n += 32) {
        any |= number<Real>(*element_of<T>(args_.b, step + k, n)) != 0;
      }
      any = __any_sync(0xffffffffu, any);
      if (lane == 0) {
        shared_.counted[k] = any;
      }
    }
    __syncthreads();
  }

  // Neighbours read along the rows of what is stored.
  __device__ void load(std::int64_t step) {
    const auto counts = [&](int k) { return step + k < args_.depth && (!args_.repair || shared_.counted[k]); };
    for (int at = static_cast<int>(threadIdx.x); at < depth_step * tile; at += threads) {
      const int by_tile = at % tile, by_depth = at % depth_step;
      const int ak = args_.a_by_depth ? at / tile : by_depth, am = args_.a_by_depth ? by_tile : at / depth_step;
      const int bk = args_.b_by_column ? by_depth : at / tile, bn = args_.b_by_column ? at / depth_step : by_tile;
      const std::int64_t m = first_row_ + am, n = first_column_ + bn;
      Real a = 0, b = 0;
      if (m < args_.rows && counts(ak)) {
        a = number<Real>(args_.a_by_depth ? *element_of<T>(args_.a, step + ak, m)
                                          : *element_of<T>(args_.a, m, step + ak));
      }
      if (n < args_.columns && counts(bk)) {
        b = number<Real>(args_.b_by_column ? *element_of<T>(args_.b, n, step + bk)
                                           : *element_of<T>(args_.b, step + bk, n));
      }
      shared_.a[ak][am] = a;
      shared_.b[bk][bn] = b;
    }
  }

  __device__ void multiply() {
    Real part[each][each] = {};
#pragma unroll
    for (int k = 0; k < depth_step; ++k) {
#pragma unroll
      for (int slot = 0; slot < each * each; ++slot) {
        part[slot / each][slot % each] += shared_.a[k][down() + slot / each] * shared_.b[k][across() + slot % each];
      }
    }
#pragma unroll
    for (int slot = 0; slot < each * each; ++slot) {
      sums_[slot / each][slot % each] += part[slot / each][slot % each];
    }
  }

  __device__ void store() const {
#pragma unroll
    for (int slot = 0; slot < each * each; ++slot) {
      const std::int64_t row = first_row_ + down() + slot / each, column = first_column_ + across() + slot % each;
      if (row < args_.rows && column < args_.columns) {
        T* target = element_of<T>(args_.product, row, column);
        const Real bias = args_.bias == nullptr ? Real(0) : number<Real>(static_cast<const T*>(args_.bias)[column]);
        if (!args_.repair || is_nan(*target)) {
          *target = element<T>(sums_[slot / each][slot % each] + bias);
        }
      }
    }
  }

  // The thread's first row and column of the tile.
  __device__ static int down() { return static_cast<int>(threadIdx.x) / (tile / each) * each; }
  __device__ static int across() { return static_cast<int>(threadIdx.x) % (tile / each) * each; }

  const ProductArguments& args_;
  Shared& shared_;
  std::int64_t first_row_, first_column_;
  Real sums_[each][each] = {};
};

template <class T>
__global__ void __launch_bounds__(threads) linear_product(const __grid_constant__ ProductArguments args) {
  __shared__ typename ProductTile<T>::Shared shared;
  const std::int64_t across = (args.columns + tile - 1) / tile, tiles = (args.rows + tile - 1) / tile * across;
  for (std::int64_t task = blockIdx.x; task < tiles; task += gridDim.x) {
    ProductTile<T>(args, shared, task / across * tile, task % across * tile).run();
  }
}

// ---- Sums of columns ----

constexpr std::int64_t chunk_rows = 256;
constexpr int chunk_columns = 32;

// A block of threads sums a chunk of rows of 32 columns: 8 threads a column take every eighth row, then the first of
// them adds the eight. The matrix is read once, the sums are small.
template <class T>
__global__ void __launch_bounds__(threads)
    column_chunks(const LinearMatrix matrix, std::int64_t rows, std::int64_t columns, RealOf<T>* partial) {
  using Real = RealOf<T>;
  constexpr int lanes = threads / chunk_columns;
  __shared__ Real shared[lanes][chunk_columns];
  const int at = static_cast<int>(threadIdx.x) % chunk_columns, lane = static_cast<int>(threadIdx.x) / chunk_columns;
  const std::int64_t column_blocks = (columns + chunk_columns - 1) / chunk_columns;
  const std::int64_t tasks = (rows + chunk_rows - 1) / chunk_rows * column_blocks;
  for (std::int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const std::int64_t chunk = task / column_blocks, c = task % column_blocks * chunk_columns + at;
    const std::int64_t begin = chunk * chunk_rows;
    const std::int64_t end = begin + chunk_rows < rows ? begin + chunk_rows : rows;
    Real sum = 0;
    const std::int64_t last = c < columns ? end : begin;
    if (rows <= matrix.inner) {  // one axis of rows: no division between a load and the next
      const T* column = static_cast<const T*>(matrix.data) + c * matrix.column;
#pragma unroll 8
      for (std::int64_t r = begin + lane; r < last; r += lanes) {
        sum += number<Real>(column[r * matrix.row]);
      }
    } else {
      for (std::int64_t r = begin + lane; r < last; r += lanes) {
        sum += number<Real>(*element_of<T>(matrix, r, c));
      }
    }
    shared[lane][at] = sum;
    __syncthreads();
    if (lane == 0 && c < columns) {
      Real total = 0;
#pragma unroll
      for (int x = 0; x < lanes; ++x) {
        total += shared[x][at];
      }
      partial[chunk * columns + c] = total;
    }
    __syncthreads();
  }
}

template <class T>
__global__ void __launch_bounds__(threads)
    join_chunks(const RealOf<T>* partial, std::int64_t chunks, std::int64_t columns, T* sums) {
  const std::int64_t step = std::int64_t{gridDim.x} * threads;
  for (std::int64_t c = std::int64_t{blockIdx.x} * threads + threadIdx.x; c < columns; c += step) {
    RealOf<T> total = 0;
#pragma unroll 16
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
      total += partial[chunk * columns + c];
    }
    sums[c] = element<T>(total);
  }
}

// launch<T>() for a float type.
template <class Launch>
cudaError_t of_type(DType dtype, const Launch& launch) {
  switch (dtype) {
    case DType::f64: return launch.template operator()<double>();
    case DType::bf16: return launch.template operator()<bfloat16>();
    case DType::f16: return launch.template operator()<float16>();
    default: return launch.template operator()<float>();
  }
}

}  // namespace

cudaError_t launch_product(const ProductArguments& arguments, DType dtype, cudaStream_t stream) {
  const dim3 size = grid(blocks(arguments.rows, tile) * blocks(arguments.columns, tile));
  return of_type(dtype, [&]<class T>() { return start(linear_product<T>, size, threads, stream, arguments); });
}

std::int64_t column_sum_chunks(std::int64_t rows) { return blocks(rows, chunk_rows); }

cudaError_t launch_column_sums(const LinearMatrix& matrix, std::int64_t rows, std::int64_t columns, DType dtype,
                               void* partial, void* sums, cudaStream_t stream) {
  const std::int64_t chunks = column_sum_chunks(rows);
  return of_type(dtype, [&]<class T>() {
    auto* parts = static_cast<RealOf<T>*>(partial);
    if (chunks > 0) {
      const dim3 size = grid(chunks * blocks(columns, chunk_columns));
      if (const cudaError_t result = start(column_chunks<T>, size, threads, stream, matrix, rows, columns, parts)) {
        return result;
      }
    }
    return start(join_chunks<T>, grid(blocks(columns, threads)), threads, stream, parts, chunks, columns,
                 static_cast<T*>(sums));
  });
}

}  // namespace headway::cuda
