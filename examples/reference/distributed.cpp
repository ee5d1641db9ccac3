#include <headway/distributed.h>

#include "examples.h"

using namespace headway;

namespace {

// One rank, which has nobody to talk to.
class Alone : public distributed::Transport {
 public:
  int rank() const override { return 0; }
  int ranks() const override { return 1; }
  void begin(std::span<const Message>, std::span<const Message>) override {}
  void wait() override {}
  std::vector<std::string> all_gather(const std::string& text) override { return {text}; }
};

void example_count() {
  const distributed::Shard shard = {{0, 4}, {12, 16}};
  std::cout << distributed::count(shard) << " rows, the first " << shard[0].count() << '\n';  // 8 rows, the first 4
}

void example_contiguous() {
  const distributed::Sharding even = distributed::contiguous(10, 10, 3);
  std::cout << even.queries[1][0].begin << " to " << even.queries[1][0].end << '\n';  // 4 to 7
  const std::vector<std::int64_t> queries = {3, 0}, keys = {2, 5};                    // so many rows on each rank
  std::cout << distributed::contiguous(queries, keys).queries[1].size() << '\n';      // 0
}

void example_zigzag() {
  const distributed::Sharding sharding = distributed::zigzag(16, 16, 2);
  for (const distributed::Rows& rows : sharding.queries[0]) {
    std::cout << rows.begin << " to " << rows.end << '\n';
    // 0 to 4
    // 12 to 16
  }
}

void example_Seen() {
  // Each query sees itself and the two keys before it.
  const distributed::Seen seen(8, 8, {{.queries = {0, 8}, .keys = {0, 8}, .first = -2, .last = 0}});
  std::cout << seen.queries() << " queries, " << seen.keys() << " keys, " << seen.strips().size() << " strip\n";
  // 8 queries, 8 keys, 1 strip
  std::cout << seen.pairs() << " pairs\n";                                  // 21 pairs
  std::cout << seen.keys_of({{6, 8}})[0].begin << '\n';                     // 4
  std::cout << seen.queries_of({{0, 1}})[0].end << " queries see key 0\n";  // 3 queries see key 0
}

void example_seen() {
  const distributed::Sizes sizes{.queries = 100, .keys = 100};
  std::cout << distributed::seen(sizes, {.causal = Causal::square}).pairs() << '\n';  // 5050
  const Tensor starts = cu_seqlens({40, 60});
  std::cout << distributed::seen(sizes, {}, distributed::Packing{starts, starts}).pairs() << '\n';  // 5200
}

void example_balanced() {
  const Tensor starts = cu_seqlens({600, 100, 300});
  const distributed::Sizes sizes{.queries = 1000, .keys = 1000};
  const distributed::Seen seen =
      distributed::seen(sizes, {.causal = Causal::square}, distributed::Packing{starts, starts});
  const distributed::Sharding sharding = distributed::balanced(seen, 2);
  std::cout << distributed::count(sharding.queries[0]) << " rows each\n";  // 500 rows each
}

void example_name() { std::cout << distributed::name(distributed::Scheme::all_gather) << '\n'; }  // all_gather

void example_Schedule() {
  const distributed::Sizes sizes{.queries = 64, .keys = 64};
  const distributed::Schedule plan =
      distributed::schedule(distributed::Scheme::ring, sizes, distributed::seen(sizes, {.causal = Causal::square}),
                            distributed::contiguous(64, 64, 2));
  std::cout << plan.ranks() << " ranks, " << plan.tiles(1).size()
            << " tiles on rank 1\n";                                    // 2 ranks, 2 tiles on rank 1
  std::cout << plan.received_by(0).size() << " transfers to rank 0\n";  // 0 transfers to rank 0
}

void example_schedule() {
  const distributed::Sizes sizes{.queries = 64, .keys = 64};
  const distributed::Schedule plan =
      distributed::schedule(distributed::Scheme::ring, sizes, distributed::seen(sizes, {.window = Window{4, 4}}),
                            distributed::contiguous(64, 64, 4));
  std::cout << plan.transfers.size() << " transfers of " << plan.transfers[0].rows.count() << " rows\n";
  // 6 transfers of 4 rows
}

void example_least_bytes() {
  const distributed::Sizes sizes{.queries = 64, .keys = 64};
  const distributed::Schedule plan = distributed::schedule(distributed::Scheme::ring, sizes, distributed::seen(sizes),
                                                           distributed::contiguous(64, 64, 2));
  std::cout << distributed::least_bytes(plan) << '\n';  // 32768
}

void example_simulate() {
  const distributed::Sizes sizes{.heads = 16, .kv_heads = 16, .queries = 16384, .keys = 16384};
  const distributed::Schedule plan =
      distributed::schedule(distributed::Scheme::ring, sizes, distributed::seen(sizes, {.causal = Causal::square}),
                            distributed::contiguous(16384, 16384, 4));
  const distributed::Estimate estimate = distributed::simulate(plan, {.flops = 1e11});
  std::cout << std::round(100 * estimate.imbalance) << " % more on the last rank\n";  // 75 % more on the last rank
}

void example_choose() {
  const distributed::Sizes decode{.heads = 32, .kv_heads = 8, .queries = 1, .keys = 1 << 20};
  const distributed::Scheme scheme =
      distributed::choose(decode, distributed::seen(decode), distributed::contiguous(1, 1 << 20, 8));
  std::cout << distributed::name(scheme) << '\n';  // pass_query
}

void example_plan() {
  const distributed::Sizes sizes{.heads = 8, .kv_heads = 2, .queries = 1 << 16, .keys = 1 << 16};
  const distributed::Schedule schedule =
      distributed::plan(distributed::Scheme::hybrid, sizes, distributed::seen(sizes, {.causal = Causal::square}),
                        distributed::zigzag(1 << 16, 1 << 16, 8), {.ranks_per_node = 4});
  std::cout << "heads in groups of " << schedule.group << '\n';  // heads in groups of 2
}

void example_explain() {
  const distributed::Sizes sizes{.queries = 1024, .keys = 1024};
  const std::string text = distributed::explain(distributed::Scheme::ring, sizes, distributed::seen(sizes),
                                                distributed::contiguous(1024, 1024, 2));
  std::cout << text.substr(0, text.find('\n')) << '\n';  // distributed attention: ring, 2 ranks, 2 steps
}

void example_Transport() {
  Alone transport;  // a class of yours with these functions; headway/mpi.h has one for MPI
  std::cout << transport.rank() << " of " << transport.ranks() << '\n';  // 0 of 1
  transport.wait();
  transport.progress();
  std::cout << transport.all_gather("what this rank has")[0] << '\n';  // what this rank has
}

void example_attention() {
  Alone transport;
  const Tensor x({1, 2, 4, 8});  // the rows of this rank
  Tensor out(x.sizes()), lse({1, 2, 4});
  distributed::attention(x, x, x, out, transport, {.attention = {.causal = Causal::square}}, {.lse = lse});
  std::cout << std::exp(lse.at<float>({0, 0, 3})) << " keys of equal weight\n";  // 4 keys of equal weight
}

void example_attention_backward() {
  Alone transport;
  const Tensor x({1, 2, 4, 8});
  Tensor out(x.sizes()), lse({1, 2, 4}), dq(x.sizes()), dk(x.sizes()), dv(x.sizes());
  distributed::attention(x, x, x, out, transport, {}, {.lse = lse});
  distributed::attention_backward(x, x, x, x, out, lse, {.dq = dq, .dk = dk, .dv = dv}, transport);
  std::cout << dv.at<float>({0, 0, 0, 0}) << '\n';  // 0
}

void example_attention_part() {
  const Tensor q({1, 1, 2, 4}), k({1, 1, 3, 4});
  Tensor out(q.sizes()), lse({1, 1, 2});
  // Queries 10 and 11 against keys 9 to 11, causal: query 10 sees two of them.
  distributed::attention_part(q, k, k, out, 10 - 9, {.causal = Causal::top_left}, {.lse = lse});
  std::cout << std::exp(lse.at<float>({0, 0, 0})) << '\n';  // 2
}

void example_attention_part_backward() {
  const Tensor q({1, 1, 2, 4}), k({1, 1, 3, 4});
  Tensor out(q.sizes()), lse({1, 1, 2}), dv(k.sizes());
  distributed::attention_part(q, k, k, out, 1, {}, {.lse = lse});
  distributed::attention_part_backward(q, q, k, k, out, lse, {.dv = dv}, 1);
  std::cout << dv.at<float>({0, 0, 2, 3}) << '\n';  // 0
}

}  // namespace

void distributed_examples() {
  example_count();
  example_contiguous();
  example_zigzag();
  example_Seen();
  example_seen();
  example_balanced();
  example_name();
  example_Schedule();
  example_schedule();
  example_least_bytes();
  example_simulate();
  example_choose();
  example_plan();
  example_explain();
  example_Transport();
  example_attention();
  example_attention_backward();
  example_attention_part();
  example_attention_part_backward();
}
