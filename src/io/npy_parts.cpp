// Slices of .npy files, read and written where they lie.
#include "core/out_of_memory.h"
#include "headway/io.h"
#include "io/bytes.h"
#include "io/npy_format.h"
#include "io/tensor_bytes.h"

namespace headway {
namespace {

// Where a slice along an axis lies among the elements in C order: `runs` of `bytes` each, `stride` bytes apart.
struct SliceRuns {
  std::uint64_t runs = 1, bytes = 0, stride = 0, first = 0;

  SliceRuns(const Dims& sizes, DType dtype, int axis, std::int64_t begin, std::int64_t end) {
    std::uint64_t inner = size_of(dtype);
    for (int n = 0; n < sizes.size(); ++n) {
      (n < axis ? runs : inner) *= n == axis ? 1 : static_cast<std::uint64_t>(sizes[n]);
    }
    bytes = static_cast<std::uint64_t>(end - begin) * inner;
    stride = static_cast<std::uint64_t>(sizes[axis]) * inner;
    first = static_cast<std::uint64_t>(begin) * inner;
  }
};

void check_slice(const io::FileContext& context, const Dims& sizes, int axis, std::int64_t begin, std::int64_t end) {
  if (axis < 0 || axis >= sizes.size()) {
    context.fail("expected an axis of shape ", sizes, ", found ", axis);
  }
  if (begin < 0 || end < begin || end > sizes[axis]) {
    context.fail("expected a slice inside the ", sizes[axis], " of axis ", axis, ", found ", begin, " to ", end);
  }
}

struct OpenNpy {
  OpenNpy(const char* operation, const std::filesystem::path& path, const ReadLimits& limits) : file(operation, path) {
    io::FileRange source(file, 0, file.size());
    header = io::read_npy_header(source, file.context(), limits);
    elements = file.size() - source.remaining();
  }
  io::InputFile file;
  io::NpyHeader header;
  std::uint64_t elements = 0;  // where they begin
};

}  // namespace

NpyShape npy_shape(const std::filesystem::path& path, const ReadLimits& limits) try {
  const OpenNpy npy("npy_shape", path, limits);
  return {npy.header.dtype, npy.header.sizes};
} catch (...) {
  throw_own_error("npy_shape");
}

Tensor load_npy_slice(const std::filesystem::path& path, int axis, std::int64_t begin, std::int64_t end,
                      const ReadLimits& limits) try {
  const OpenNpy npy("load_npy_slice", path, limits);
  check_slice(npy.file.context(), npy.header.sizes, axis, begin, end);
  Dims sizes = npy.header.stored_sizes();
  const int stored_axis = npy.header.fortran_order ? sizes.size() - 1 - axis : axis;
  const SliceRuns slice(sizes, npy.header.dtype, stored_axis, begin, end);
  sizes[stored_axis] = end - begin;
  Tensor stored = Tensor::uninitialized(sizes, npy.header.dtype);
  auto* target = static_cast<std::byte*>(stored.data());
  for (std::uint64_t run = 0; run < slice.runs && slice.bytes > 0; ++run, target += slice.bytes) {
    npy.file.read_at(npy.elements + slice.first + run * slice.stride, {target, slice.bytes});
  }
  return npy.header.as_meant(std::move(stored));
} catch (...) {
  throw_own_error("load_npy_slice");
}

std::filesystem::path begin_npy(const std::filesystem::path& path, const NpyShape& shape,
                                const WriteOptions& options) try {
  io::refuse_other_format("begin_npy", path, ".npy");
  const double element = 0;
  io::require_npy("begin_npy", "", {&element, shape.dtype, {0}});
  io::OutputFile file("begin_npy", path, options.overwrite, io::OutputFile::Temporary::named);
  const io::FileContext context("begin_npy", path);
  const std::uint64_t bytes = io::checked_bytes(shape.sizes, shape.dtype, {}, context);
  file.write(io::bytes_of(io::npy_header(shape.sizes, shape.dtype)));
  file.resize(file.position() + bytes);
  return file.let_go();
} catch (...) {
  throw_own_error("begin_npy");
}

void write_npy_slice(const std::filesystem::path& temporary, int axis, std::int64_t begin, ConstTensorView slice) try {
  const OpenNpy npy("write_npy_slice", temporary, {});
  const Dims& sizes = npy.header.sizes;
  const std::int64_t end = begin + (axis >= 0 && axis < slice.rank() ? slice.size(axis) : 0);
  check_slice(npy.file.context(), sizes, axis, begin, end);
  Dims expected = sizes;
  expected[axis] = end - begin;
  if (slice.sizes() != expected || slice.dtype() != npy.header.dtype || !(slice.device() == Device{})) {
    npy.file.context().fail("expected ", npy.header.dtype, " of shape ", expected, " in host memory, found ",
                            slice.dtype(), " of shape ", slice.sizes(), " on ", slice.device());
  }
  const Tensor contiguous = convert(slice, slice.dtype());
  const SliceRuns runs(sizes, npy.header.dtype, axis, begin, end);
  const auto* source = static_cast<const std::byte*>(contiguous.data());
  io::OutputFile file("write_npy_slice", temporary, true, temporary);
  file.disown();
  for (std::uint64_t run = 0; run < runs.runs && runs.bytes > 0; ++run, source += runs.bytes) {
    file.rewrite(npy.elements + runs.first + run * runs.stride, {source, runs.bytes});
  }
  file.let_go();
} catch (...) {
  throw_own_error("write_npy_slice");
}

void commit_npy(const std::filesystem::path& temporary, const std::filesystem::path& path,
                const WriteOptions& options) try {
  io::OutputFile("commit_npy", path, options.overwrite, temporary).commit();
} catch (...) {
  throw_own_error("commit_npy");
}

}  // namespace headway
