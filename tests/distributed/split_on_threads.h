// Split calls over ranks that are threads, with every kind of shard.
#pragma once

#include "split_call.h"
#include "thread_ranks.h"

namespace headway::test {

using distributed::Scheme;
using distributed::Sharding;

inline constexpr Scheme schemes[] = {Scheme::ring, Scheme::all_gather, Scheme::heads, Scheme::pass_query,
                                     Scheme::hybrid};

// Every rank has the same whole result; the first one's.
inline SplitResults run_split(const SplitCall& split, int ranks, const ConstTensorView* grad_out,
                              double* bytes = nullptr) {
  std::optional<SplitResults> first;
  ThreadRanks world(ranks, std::chrono::seconds(20));
  const auto errors = world.run([&](distributed::Transport& transport) {
    SplitResults results = split.run(transport, grad_out);
    if (transport.rank() == 0) first = std::move(results);
  });
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
  if (bytes != nullptr) *bytes = world.bytes();
  return std::move(*first);
}

inline std::vector<Sharding> shardings(std::int64_t queries, std::int64_t keys, int ranks) {
  std::vector<Sharding> all = {distributed::contiguous(queries, keys, ranks),
                               distributed::zigzag(queries, keys, ranks)};
  // All rows on one rank, and shards whose ranges come in another order than the sequence's.
  Sharding lopsided = all[0], reversed = all[1];
  for (auto* side : {&lopsided.queries, &lopsided.keys}) {
    const std::int64_t length = side == &lopsided.queries ? queries : keys;
    for (auto& shard : *side) shard.clear();
    (*side)[static_cast<std::size_t>(ranks - 1)] = {{0, length}};
  }
  if (ranks > 1) {
    lopsided.keys[0] = {{0, keys / 3}};
    lopsided.keys[static_cast<std::size_t>(ranks - 1)] = {{keys / 3, keys}};
  }
  for (auto* side : {&reversed.queries, &reversed.keys})
    for (auto& shard : *side) std::reverse(shard.begin(), shard.end());
  all.push_back(lopsided);
  all.push_back(reversed);
  return all;
}

inline bool is_possible(Scheme scheme, const Call& call, std::int64_t kv_heads, int ranks) {
  if (scheme == Scheme::heads && kv_heads < ranks) return false;
  if (scheme == Scheme::hybrid && (ranks != 4 || kv_heads < 2)) return false;
  return call.packing || !(call.options.mask || call.options.bias) || scheme == Scheme::ring ||
         scheme == Scheme::all_gather;
}

// hybrid needs two groups of two.
inline int ranks_for(Scheme scheme, int ranks) { return scheme == Scheme::hybrid ? 4 : ranks; }

inline void expect_contract_on_ranks(const Call& call, const Sharding& sharding, Scheme scheme, int ranks) {
  Random random(7);
  const Tensor grad_out = normal(call.out_sizes(), call.q.dtype(), random);
  const ConstTensorView view = grad_out;
  expect_split(call, run_split({call, sharding, scheme}, ranks, &view), grad_out);
}

}  // namespace headway::test
