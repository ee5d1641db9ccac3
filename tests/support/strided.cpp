#include "support/strided.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

namespace headway::test {
namespace {

constexpr unsigned char untouched = 0xFF;  // a NaN in every floating type
constexpr std::int64_t margin = 64;        // elements before and after

// Memory order of the axes, outermost first.
std::vector<int> memory_order(int rank, Layout layout) {
  std::vector<int> order(static_cast<std::size_t>(rank));
  std::iota(order.begin(), order.end(), 0);
  if (layout == Layout::heads_inside && rank >= 4) std::swap(order[1], order[2]);
  if (layout == Layout::heads_inside && (rank == 2 || rank == 3)) std::swap(order[0], order[1]);
  return order;
}

// The axis with stride 0, or -1.
int repeated_axis(int rank, Layout layout) {
  switch (layout) {
    case Layout::repeated: return 0;
    case Layout::repeated_heads: return std::min(1, rank - 1);
    case Layout::repeated_rows: return std::max(0, rank - 2);
    case Layout::repeated_columns: return rank - 1;
    default: return -1;
  }
}

}  // namespace

const char* name(Layout layout) {
  switch (layout) {
    case Layout::contiguous: return "contiguous";
    case Layout::heads_inside: return "heads inside";
    case Layout::gaps: return "gaps";
    case Layout::reversed: return "reversed";
    case Layout::misaligned: return "misaligned";
    case Layout::repeated: return "repeated";
    case Layout::repeated_heads: return "repeated heads";
    case Layout::repeated_rows: return "repeated rows";
    case Layout::repeated_columns: return "repeated columns";
  }
  return "?";
}

Strided::Strided(const Dims& sizes, DType dtype, Layout layout) : dtype_(dtype), sizes_(sizes), strides_(sizes) {
  const std::vector<int> order = memory_order(sizes.size(), layout);
  std::int64_t step = layout == Layout::gaps ? 2 : 1;
  for (auto axis = order.rbegin(); axis != order.rend(); ++axis) {
    strides_[*axis] = layout == Layout::reversed ? -step : step;
    if (*axis == repeated_axis(sizes.size(), layout)) strides_[*axis] = 0;
    const std::int64_t padding = layout == Layout::gaps || (layout == Layout::misaligned && axis == order.rbegin());
    step *= std::max<std::int64_t>(sizes[*axis], 1) + padding;
  }
  const std::int64_t last = margin + (layout == Layout::misaligned) + step;
  first_ = layout == Layout::reversed ? last - 1 : last - step;
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  bytes_.assign(static_cast<std::size_t>((last + margin) * element + 64), untouched);
  aligned_ = (64 - reinterpret_cast<std::uintptr_t>(bytes_.data()) % 64) % 64;
}

void* Strided::address() { return bytes_.data() + aligned_ + static_cast<std::size_t>(first_) * size_of(dtype_); }

bool Strided::surroundings_intact() const {
  std::vector<unsigned char> rest = bytes_;
  const std::size_t element = size_of(dtype_);
  Dims starts = sizes_;  // of runs of elements that lie side by side
  std::size_t run = element;
  const int last = sizes_.size() - 1;
  if (last >= 0 && strides_[last] == 1 && sizes_[last] > 0) {
    run *= static_cast<std::size_t>(sizes_[last]);
    starts[last] = 1;
  }
  each_index(starts, [&](const Dims& index) {
    std::int64_t position = first_;
    for (int axis = 0; axis < starts.size(); ++axis) position += index[axis] * strides_[axis];
    std::memset(rest.data() + aligned_ + static_cast<std::size_t>(position) * element, untouched, run);
  });
  // All bytes are alike if the first is as it was and each is like the one before it.
  return rest.empty() || (rest.front() == untouched && std::memcmp(rest.data(), rest.data() + 1, rest.size() - 1) == 0);
}

void fill_normal(TensorView view, Random& random, double size) {
  std::normal_distribution<double> normal_number(0.0, size);
  each_index(view.sizes(), [&](const Dims& index) { set(view, index, normal_number(random)); });
}

void fill_bool(TensorView view, Random& random, double probability) {
  std::bernoulli_distribution coin(probability);
  each_index(view.sizes(), [&](const Dims& index) { set(view, index, coin(random)); });
}

Tensor normal(const Dims& sizes, DType dtype, Random& random, double size) {
  Tensor result(sizes, dtype);
  fill_normal(result, random, size);
  return result;
}

Strided normal_strided(const Dims& sizes, DType dtype, Layout layout, Random& random, double size) {
  Strided result(sizes, dtype, layout);
  fill_normal(result.view(), random, size);
  return result;
}

Tensor filled(const Dims& sizes, DType dtype, double value) {
  Tensor result(sizes, dtype);
  const std::int64_t elements = result.elements();
  if (elements == 0) return result;
  // The first element, and then what is filled once more, twice as long each time.
  set(result, index_of(0, sizes), value);
  auto* data = static_cast<char*>(result.view().data());
  for (std::int64_t done = 1; done < elements; done *= 2)
    std::memcpy(data + done * static_cast<std::int64_t>(size_of(dtype)), data,
                static_cast<std::size_t>(std::min(done, elements - done)) * size_of(dtype));
  return result;
}

}  // namespace headway::test
