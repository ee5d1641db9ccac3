// A matrix product's task uses no more scratch than it requests: guard bytes follow the scratch here.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "engines/cpu/arguments.h"
#include "engines/cpu/kernels.h"
#include "headway/tensor.h"
#include "support/array.h"

namespace headway::test {
namespace {

using cpu::GemmArgs;
using cpu::GemmKernel;

// x [items, per_item, depth] with padding behind each item, times w [depth, columns].
struct Case {
  std::int64_t items, per_item, padding, depth, columns;
  std::int64_t tiny_row;  // whose first number no product of pairs takes; -1: none
};

const Case cases[] = {{2, 16, 4, 2048, 64, 16}, {2, 16, 4, 2048, 64, 31}, {2, 16, 4, 2048, 64, 0},
                      {2, 16, 4, 2048, 64, -1}, {2, 16, 0, 2048, 64, 16}, {3, 40, 1, 1030, 65, 41},
                      {4, 3, 7, 513, 200, 5},   {1, 33, 0, 2050, 70, 9},  {5, 1, 3, 4096, 30, 2},
                      {2, 16, 4, 100, 64, 16},  {8, 9, 1, 2048, 64, 71}};

std::ostream& operator<<(std::ostream& stream, const Case& c) {
  return stream << c.items << " items of " << c.per_item << " rows, " << c.padding << " between, depth " << c.depth
                << ", " << c.columns << " columns, row " << c.tiny_row << " tiny";
}

double pattern(std::int64_t n) { return static_cast<double>(n * 7919 % 2001 - 1000) / 1000; }

Tensor patterned(const Dims& sizes, DType dtype) {
  Tensor numbers(sizes, DType::f64);
  for (std::int64_t n = 0; n < numbers.elements(); ++n) {
    numbers.as<double>()[n] = pattern(n);
  }
  return convert(numbers, dtype);
}

// Runs all rows and columns as one task; whether the bytes behind its scratch are as they were.
bool leaves_guard_alone(const GemmKernel& kernel, const GemmArgs& args) {
  constexpr std::size_t guard = std::size_t{1} << 18;
  constexpr unsigned char untouched = 0xa5;
  const auto bytes = static_cast<std::size_t>(kernel.scratch_bytes(args));
  std::vector<unsigned char> memory(bytes + guard + 64, untouched);
  unsigned char* scratch = memory.data();
  scratch += (64 - reinterpret_cast<std::uintptr_t>(scratch) % 64) % 64;
  kernel.run(args, scratch);
  return std::all_of(scratch + bytes, scratch + bytes + guard, [](unsigned char byte) { return byte == untouched; });
}

void expect_own_scratch(const Case& c, DType dtype) {
  const std::int64_t rows = c.items * c.per_item, item = c.per_item + c.padding;
  Tensor x = patterned({c.items, item, c.depth}, dtype);
  const Tensor w = patterned({c.depth, c.columns}, dtype);
  if (c.tiny_row >= 0 && c.tiny_row < rows) {
    const double tiny = 1e-20;
    const Tensor number = convert(ConstTensorView(&tiny, DType::f64, {1}), dtype);
    copy(number, x.view().select(0, c.tiny_row / c.per_item).select(0, c.tiny_row % c.per_item).slice(0, 0, 1));
  }
  Tensor y({rows, c.columns}, dtype);
  GemmArgs args;
  args.left = {x.data(), c.per_item, item * c.depth, c.depth, 1};
  args.right = {w.data(), c.depth, 0, c.columns, 1};
  args.out = {y.data(), rows, 0, c.columns, 1};
  args.rows = args.row_end = rows;
  args.columns = args.column_end = c.columns;
  args.depth = c.depth;
  const GemmKernel& kernel = cpu::chosen_kernels().gemm[static_cast<int>(cpu::storage_of(dtype))];
  ASSERT_TRUE(leaves_guard_alone(kernel, args));
  for (const std::int64_t r : {std::int64_t{0}, std::clamp<std::int64_t>(c.tiny_row, 0, rows - 1), rows - 1}) {
    double sum = 0, terms = 0;
    for (std::int64_t k = 0; k < c.depth; ++k) {
      const double term = get(x.view(), {r / c.per_item, r % c.per_item, k}) * get(w.view(), {k, c.columns - 1});
      sum += term;
      terms += std::fabs(term);
    }
    const double roundoff = dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0;
    EXPECT_NEAR(get(y.view(), {r, c.columns - 1}), sum, 16 * 0x1p-24 * terms + roundoff * std::fabs(sum));
  }
}

TEST(GemmScratch, is_all_that_a_task_writes_wherever_its_rows_lie) {
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    for (const Case& c : cases) {
      SCOPED_TRACE(testing::Message() << dtype << ", " << c);
      expect_own_scratch(c, dtype);
    }
  }
}

}  // namespace
}  // namespace headway::test
