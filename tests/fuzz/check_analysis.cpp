// The statistics of analyze(), parts of the matrix and its mean over the heads against the same sums over the oracle's
// weights, with the weights' own bounds.
#include <algorithm>
#include <cmath>
#include <sstream>

#include "fuzz/check.h"
#include "support/run.h"
#include "support/units.h"

namespace headway::test::fuzz {
namespace {

constexpr std::int64_t most_pairs = 20000;

// A sum over weights and what it may be off by.
struct Sum {
  Real value = 0, error = 0;
  void add(Real factor, Real weight, Real bound) {
    value += factor * weight;
    error += std::abs(factor) * bound;
  }
};

class Statistics {
 public:
  Statistics(const Prepared& prepared, const Call& call, const Analysis& found, const AnalysisRequest& request)
      : spec_(prepared.spec), exact_(prepared.forward), found_(found), request_(request) {
    const DType type = call.q.dtype() == DType::f64 ? DType::f64 : DType::f32;
    unit_ = type == DType::f64 ? 0x1p-53L : 0x1p-24L;
    bound_ = error_bound(exact_.weights, Kind::weights, type);
  }

  std::optional<Failure> check() {
    const Array& p = exact_.weights.value;
    for (std::int64_t b = 0; b < p.size(0); ++b)
      for (std::int64_t h = 0; h < p.size(1); ++h) {
        for (std::int64_t i = 0; i < p.size(2); ++i) row(b, h, i);
        received(b, h);
        maps(b, h);
      }
    return failure_;
  }

  // The weights of a rectangle, and their mean over the heads.
  std::optional<Failure> check_parts(const Call& call, Random& random) {
    const Array& p = exact_.weights.value;
    const auto range = [&](std::int64_t size) {
      const auto end = static_cast<std::uint64_t>(size) + 1;
      return std::minmax({static_cast<std::int64_t>(random() % end), static_cast<std::int64_t>(random() % end)});
    };
    const auto rows = range(p.size(2)), keys = range(p.size(3));
    const Rectangle rectangle{rows.first, rows.second, keys.first, keys.second};
    std::optional<ConstTensorView> lse;
    if (random() % 2 == 0) lse = found_.lse;
    const Tensor part = run_weights_in(call.q, call.k, rectangle, call.options, lse);
    each_index(part.sizes(), [&](const Dims& at) {
      Sum weight;
      const std::int64_t i = rows.first + at[2], j = keys.first + at[3];
      weight.add(1, p(at[0], at[1], i, j), bound_(at[0], at[1], i, j));
      expect("weights in", part, at, weight);
    });
    Tensor mean(call.q.rank() == 2 ? Dims{p.size(2), p.size(3)} : Dims{p.size(0), p.size(2), p.size(3)},
                call.q.dtype());
    run_mean_weights(call.q, call.k, found_.lse, mean, call.options);
    each_index(mean.sizes(), [&](const Dims& at) {
      const std::int64_t b = at.size() == 2 ? 0 : at[0], i = at[at.size() - 2], j = at[at.size() - 1];
      Sum sum;
      for (std::int64_t h = 0; h < p.size(1); ++h) sum.add(1, p(b, h, i, j), bound_(b, h, i, j));
      const Real heads = static_cast<Real>(std::max<std::int64_t>(p.size(1), 1));
      sum.value /= heads;
      sum.error = sum.error / heads + half_unit_of(call.q.dtype()) * std::abs(sum.value) + quantum_of(call.q.dtype());
      expect("mean weights", mean, at, sum);
    });
    return failure_;
  }

 private:
  void expect(const char* what, ConstTensorView tensor, const Dims& at, const Sum& sum) {
    if (failure_) return;
    const Real actual = get(tensor, at), slack = 2 * sum.error + 64 * unit_ * std::abs(sum.value) + 4 * 0x1p-149L;
    if (std::isnan(sum.value) ? std::isnan(actual) : std::abs(actual - sum.value) <= slack) return;
    std::ostringstream text;
    text.precision(9);
    text << "element " << at << ": got " << actual << ", expected " << sum.value << ", bound " << slack;
    failure_ = Failure{std::string("analysis, ") + what, text.str()};
  }

  std::int64_t offset(std::int64_t b) const {
    if (spec_.causal == Causal::none) return spec_.k.size(2) - spec_.q.size(2);
    if (spec_.causal != Causal::bottom_right) return 0;
    const bool per_item = spec_.valid_lens && spec_.valid_lens->sizes().size() == 1;
    const auto number = [](Real value) { return static_cast<std::int64_t>(value); };
    return (per_item ? number((*spec_.valid_lens)(b)) : spec_.k.size(2)) -
           (spec_.query_lens ? number((*spec_.query_lens)(b)) : spec_.q.size(2));
  }

  void row(std::int64_t b, std::int64_t h, std::int64_t i) {
    const Array& p = exact_.weights.value;
    const std::int64_t position = i + offset(b);
    Sum entropy, distance, near, first, diagonal;
    for (std::int64_t j = 0; j < p.size(3); ++j) {
      const Real weight = p(b, h, i, j), bound = bound_(b, h, i, j);
      if (weight != 0) entropy.add(-std::log(weight), weight, bound);
      entropy.error += bound + (weight != 0 ? 100 * 0x1p-126L : 0);  // of weights so small that they lose bits
      distance.add(static_cast<Real>(std::abs(position - j)), weight, bound);
      const bool left = !request_.near.left || j >= position - *request_.near.left;
      const bool right = !request_.near.right || j <= position + *request_.near.right;
      if (left && right) near.add(1, weight, bound);
      if (j == 0) first.add(1, weight, bound);
      if (j == position) diagonal.add(1, weight, bound);
    }
    const Dims at{b, h, i};
    expect("entropy", found_.entropy, at, entropy);
    expect("distance", found_.distance, at, distance);
    expect("near", found_.near, at, near);
    expect("first", found_.first, at, first);
    expect("diagonal", found_.diagonal, at, diagonal);
    top(b, h, i);
  }

  // Each key that is named has its own weight, and no smaller one is named before it.
  void top(std::int64_t b, std::int64_t h, std::int64_t i) {
    const Array& p = exact_.weights.value;
    double before = 2;
    for (std::int64_t n = 0; n < found_.top_keys.size(3) && !failure_; ++n) {
      const std::int64_t key = found_.top_keys.at<std::int64_t>({b, h, i, n});
      const double weight = get(found_.top_weights, {b, h, i, n});
      if (std::isnan(exact_.lse.value(b, h, i))) continue;
      Sum expected;
      if (key >= 0 && key < p.size(3)) expected.add(1, p(b, h, i, key), bound_(b, h, i, key));
      expect("top weights", found_.top_weights, {b, h, i, n}, expected);
      if (weight > before || key >= p.size(3) || (key < 0) != (weight == 0))
        failure_ = Failure{"analysis, top keys", "key " + std::to_string(key) + " of row " + std::to_string(i)};
      before = weight;
    }
  }

  void received(std::int64_t b, std::int64_t h) {
    const Array& p = exact_.weights.value;
    for (std::int64_t j = 0; j < p.size(3); ++j) {
      Sum sum;
      for (std::int64_t i = 0; i < p.size(2); ++i) sum.add(1, p(b, h, i, j), bound_(b, h, i, j));
      expect("received", found_.received, {b, h, j}, sum);
    }
  }

  void maps(std::int64_t b, std::int64_t h) {
    const Array& p = exact_.weights.value;
    for (std::int64_t r = 0; r < found_.map_mean.size(2); ++r)
      for (std::int64_t c = 0; c < found_.map_mean.size(3); ++c) {
        Sum mean, highest;
        Real count = 0;
        for (std::int64_t i = r * found_.row_cell; i < std::min((r + 1) * found_.row_cell, p.size(2)); ++i)
          for (std::int64_t j = c * found_.key_cell; j < std::min((c + 1) * found_.key_cell, p.size(3)); ++j) {
            mean.add(1, p(b, h, i, j), bound_(b, h, i, j));
            highest.value = std::max(highest.value, p(b, h, i, j));
            highest.error = std::max(highest.error, bound_(b, h, i, j));
            count += 1;
          }
        if (std::isnan(mean.value)) continue;
        mean.value /= count;
        mean.error /= count;
        expect("map mean", found_.map_mean, {b, h, r, c}, mean);
        expect("map max", found_.map_max, {b, h, r, c}, highest);
      }
  }

  const Spec& spec_;
  const Forward& exact_;
  const Analysis& found_;
  const AnalysisRequest& request_;
  Real unit_;
  Array bound_;
  std::optional<Failure> failure_;
};

}  // namespace

std::optional<Failure> check_analysis(const Prepared& prepared, const Call& call) {
  if (prepared.forward.weights.value.elements() > most_pairs || prepared.materials.has_infinities) return std::nullopt;
  const AnalysisRequest request{.top = 3, .near = {2, 1}, .cells = 5};
  const Analysis found = run_analyze(call.q, call.k, call.options, request);
  const DType type = call.q.dtype() == DType::f64 ? DType::f64 : DType::f32;
  const bool half = call.q.dtype() == DType::bf16 || call.q.dtype() == DType::f16;
  if (const auto text = outside(found.lse, prepared.forward.lse.value,
                                error_bound(prepared.forward.lse, Kind::lse, half ? call.q.dtype() : type)))
    return Failure{"analysis, lse", *text};
  Statistics statistics(prepared, call, found, request);
  if (const auto failure = statistics.check()) return failure;
  // Open (docs/reliability.md): CUDA takes exp(s - lse) of any lse.
  const bool in_range = prepared.forward.largest_score < 0x1p12L && prepared.spec.heads() > 0;
  if (call.options.engine == Engine::cuda && !in_range) return std::nullopt;
  Random random = stream(prepared.materials.what, 35);
  return statistics.check_parts(call, random);
}

}  // namespace headway::test::fuzz
