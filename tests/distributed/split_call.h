// A whole call that ranks compute together: each takes its rows, runs the distributed functions, and puts what all
// ranks have computed together again. Works over any transport.
#pragma once

#include <algorithm>
#include <cstring>

#include "headway/distributed.h"
#include "support/inputs.h"

namespace headway::test {

struct SplitResults {
  Results forward;
  std::optional<GradientTensors> gradients;
};

// Rows of a shard along an axis, contiguous.
inline Tensor rows_of(ConstTensorView whole, int axis, const distributed::Shard& shard) {
  Dims sizes = whole.sizes();
  sizes[axis] = distributed::count(shard);
  Tensor part(sizes, whole.dtype());
  std::int64_t at = 0;
  for (const distributed::Rows& rows : shard) {
    copy(whole.slice(axis, rows.begin, rows.end), part.view().slice(axis, at, at + rows.count()));
    at += rows.count();
  }
  return part;
}

// The whole from every rank's rows, on every rank.
inline Tensor together(distributed::Transport& transport, const Tensor& mine, int axis,
                       const std::vector<distributed::Shard>& shards, std::int64_t length) {
  const auto bytes = static_cast<std::size_t>(mine.elements()) * size_of(mine.dtype());
  const std::vector<std::string> texts =
      transport.all_gather(bytes == 0 ? std::string() : std::string(static_cast<const char*>(mine.data()), bytes));
  Dims sizes = mine.sizes();
  sizes[axis] = length;
  Tensor whole(sizes, mine.dtype());
  for (std::size_t rank = 0; rank < shards.size(); ++rank) {
    sizes[axis] = distributed::count(shards[rank]);
    Tensor part(sizes, mine.dtype());
    if (!texts[rank].empty()) std::memcpy(part.data(), texts[rank].data(), texts[rank].size());
    std::int64_t at = 0;
    for (const distributed::Rows& rows : shards[rank]) {
      copy(part.view().slice(axis, at, at + rows.count()), whole.view().slice(axis, rows.begin, rows.end));
      at += rows.count();
    }
  }
  return whole;
}

// The sum over ranks, on every rank.
inline Tensor added(distributed::Transport& transport, const Tensor& mine) {
  Tensor sum(mine.sizes(), DType::f64);
  for (const std::string& text : transport.all_gather(std::string(
           static_cast<const char*>(mine.data()), static_cast<std::size_t>(mine.elements()) * size_of(mine.dtype())))) {
    Tensor one(mine.sizes(), mine.dtype());
    std::memcpy(one.data(), text.data(), text.size());
    const Array numbers = read(one);
    for (std::int64_t n = 0; n < sum.elements(); ++n)
      sum.as<double>()[n] += static_cast<double>(numbers.values[static_cast<std::size_t>(n)]);
  }
  return convert(sum, mine.dtype());
}

struct SplitCall {
  const Call& whole;
  distributed::Sharding sharding;
  distributed::Scheme scheme = distributed::Scheme::automatic;
  bool give_sharding = true;  // else it must be the contiguous one

  SplitResults run(distributed::Transport& transport, const ConstTensorView* grad_out = nullptr) const {
    const auto rank = static_cast<std::size_t>(transport.rank());
    const int axis = whole.packing ? 0 : whole.q.rank() - 2;
    const std::int64_t queries = whole.q.size(axis), keys = whole.k.size(axis);
    const Tensor q = rows_of(whole.q, axis, sharding.queries[rank]);
    const Tensor k = rows_of(whole.k, axis, sharding.keys[rank]), v = rows_of(whole.v, axis, sharding.keys[rank]);
    distributed::Options options{.attention = whole.options, .scheme = scheme};
    if (give_sharding) options.sharding = sharding;
    Tensor starts_q, starts_k;
    if (whole.packing) {
      starts_q = Tensor::of<std::int64_t>({whole.packing->starts_q.size()}, whole.packing->starts_q);
      starts_k = Tensor::of<std::int64_t>({whole.packing->starts_k.size()}, whole.packing->starts_k);
      options.packing = distributed::Packing{starts_q, starts_k};
    }
    Tensor mask, bias;
    // Whether a matrix has rows of its own for each query, of which a rank brings its own.
    const auto has_rows = [&](const std::optional<ConstTensorView>& matrix) {
      return matrix && !whole.packing && queries > 1 && matrix->rank() >= 2 && matrix->size(-2) == queries;
    };
    const auto cut = [&](std::optional<ConstTensorView>& matrix, Tensor& memory) {
      if (has_rows(matrix)) {
        memory = rows_of(*matrix, matrix->rank() - 2, sharding.queries[rank]);
        matrix = memory;
      }
    };
    cut(options.attention.mask, mask);
    cut(options.attention.bias, bias);

    const int lse_axis = whole.packing ? 1 : axis;
    Dims out_sizes = q.sizes();
    const Dims lse_sizes =
        whole.packing ? Dims{q.size(1), q.size(0)} : Dims(std::span(out_sizes.begin(), out_sizes.end() - 1));
    out_sizes[out_sizes.size() - 1] = v.size(-1);
    Tensor out(out_sizes, q.dtype()), lse(lse_sizes, whole.lse_type());
    distributed::attention(q, k, v, out, transport, options, {.lse = lse});
    SplitResults results{{together(transport, out, axis, sharding.queries, queries),
                          together(transport, lse, lse_axis, sharding.queries, queries),
                          {}},
                         {}};
    if (grad_out == nullptr) return results;
    const Tensor mine = rows_of(*grad_out, axis, sharding.queries[rank]);
    Tensor dq(q.sizes(), q.dtype()), dk(k.sizes(), q.dtype()), dv(v.sizes(), q.dtype());
    AttentionGradients gradients{dq.view(), dk.view(), dv.view(), {}, {}};
    std::optional<Tensor> dsinks;
    if (whole.options.sinks) {
      dsinks.emplace(whole.options.sinks->sizes(), whole.lse_type());
      gradients.dsinks = *dsinks;
    }
    std::optional<Tensor> dbias;
    if (whole.options.bias) {
      dbias.emplace(options.attention.bias->sizes(), whole.options.bias->dtype());
      gradients.dbias = *dbias;
    }
    distributed::attention_backward(mine, q, k, v, out, lse, gradients, transport, options);
    results.gradients = GradientTensors{together(transport, dq, axis, sharding.queries, queries),
                                        together(transport, dk, axis, sharding.keys, keys),
                                        together(transport, dv, axis, sharding.keys, keys),
                                        {},
                                        std::move(dsinks)};
    if (has_rows(whole.options.bias))
      dbias = together(transport, *dbias, dbias->rank() - 2, sharding.queries, queries);
    else if (dbias && !whole.packing && each_has_one_query())
      dbias = added(transport, *dbias);  // ranks cannot know that it is one bias, and not a row for each
    results.gradients->dbias = std::move(dbias);
    return results;
  }

 private:
  bool each_has_one_query() const {
    return std::all_of(sharding.queries.begin(), sharding.queries.end(),
                       [](const distributed::Shard& shard) { return distributed::count(shard) == 1; });
  }
};

// With the oracle.
inline void expect_split(const Call& call, const SplitResults& results, ConstTensorView grad_out) {
  expect_forward(call, results.forward);
  if (results.gradients) expect_backward(call, grad_out, const_cast<GradientTensors&>(*results.gradients));
}

}  // namespace headway::test
