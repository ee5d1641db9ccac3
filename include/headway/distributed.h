// Attention over a sequence that is split among processes ("context parallel"): the rows of each rank, the schedule of
// computation and transfers, its estimated time on a cluster, and the call itself over any message layer.
//
// Positions are global: row i of a query is row i of the whole sequence, whichever rank holds it. A rank's tensors hold
// the rows of its Shard, in the shard's order. The result is that of `attention` on the whole sequence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "headway/attention.h"
#include "headway/cxx20.h"

#pragma GCC visibility push(default)
namespace headway::distributed {

// ---- Who holds which rows ----

struct Rows {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t count() const { return end - begin; }
  bool operator==(const Rows&) const = default;
};

// The rows of one rank, in the order of its tensors. May be empty.
using Shard = std::vector<Rows>;
std::int64_t count(const Shard& shard);

// One shard for each rank; together they hold every row once.
struct Sharding {
  std::vector<Shard> queries;
  std::vector<Shard> keys;
  bool operator==(const Sharding&) const = default;
};

// Consecutive rows for each rank; if the length is not divisible, the first ranks have one row more.
Sharding contiguous(std::int64_t queries, std::int64_t keys, int ranks);
// Consecutive rows: this many for each rank.
Sharding contiguous(std::span<const std::int64_t> queries, std::span<const std::int64_t> keys);
// 2 * ranks chunks; rank r has chunks r and 2 * ranks - 1 - r, so that a causal mask gives every rank the same work.
Sharding zigzag(std::int64_t queries, std::int64_t keys, int ranks);

// ---- What may be seen ----

// Query row i of `queries` sees the keys j of `keys` with i + first <= j <= i + last. Causal, window, lengths and
// packed sequences are lists of strips, and so is any mask that gives each row a few ranges of keys.
struct Strip {
  Rows queries;
  Rows keys;
  std::int64_t first = 0;
  std::int64_t last = 0;
  double share = 1;  // of the heads: 1 / H if each head has its own strips
};

struct Sizes {
  std::int64_t batch = 1;  // packed: 1
  std::int64_t heads = 1;
  std::int64_t kv_heads = 1;
  std::int64_t queries = 0;  // of the whole sequence; packed: of all sequences
  std::int64_t keys = 0;
  std::int64_t head_dim = 64;
  std::int64_t value_dim = 64;
  DType dtype = DType::f32;
};

class Seen {
 public:
  Seen() = default;
  // The strips of all batch items or packed sequences, in any order. InvalidArgument for a strip outside the sizes.
  Seen(std::int64_t queries, std::int64_t keys, std::vector<Strip> strips);

  std::int64_t queries() const { return queries_; }
  std::int64_t keys() const { return keys_; }
  const std::vector<Strip>& strips() const { return strips_; }  // by the first of their queries

  // The (query, key) pairs of one head (the mean of the heads) inside a rectangle, over all batch items.
  double pairs(Rows of_queries, Rows of_keys) const;
  double pairs() const { return pairs({0, queries_}, {0, keys_}); }
  // The keys that some of these queries see, in order, without overlap.
  Shard keys_of(const Shard& of_queries) const;
  // The queries that see some of these keys, in order, without overlap.
  Shard queries_of(const Shard& of_keys) const;

 private:
  std::int64_t queries_ = 0;
  std::int64_t keys_ = 0;
  std::vector<Strip> strips_;
  std::int64_t longest_ = 0;  // the rows of the longest strip
  template <class Visit>
  void for_each_strip(Rows of_queries, const Visit& visit) const;
};

// The pairs that the options allow, without dense masks and biases. Packed sequences need their bounds.
struct Packing {
  ConstTensorView cu_seqlens_q, cu_seqlens_k;
};
Seen seen(const Sizes& sizes, const AttentionOptions& options = {}, const std::optional<Packing>& packing = {});

// Gives each rank as many rows, within 1 %, and nearly as many allowed pairs: an imbalance (the most pairs of a rank
// over the mean) of at most 5 % where it finds one, and among such the shards that send few rows. Packed sequences stay
// whole where that allows it, and nothing is sent then. For self-attention (Sq = Sk).
Sharding balanced(const Seen& seen, int ranks);

// ---- Who does what, and when ----

enum class Scheme : std::uint8_t {
  automatic,
  ring,        // K/V blocks arrive one after the other, the next one in flight while the last one is computed
  all_gather,  // every rank receives the K/V rows that it sees, then computes them in one call
  heads,       // all-to-all: every rank computes some heads of the whole sequence
  pass_query,  // queries go to the keys, partial results come back: few queries over many keys
  hybrid,      // heads inside groups of neighbouring ranks, a ring across the groups
};
const char* name(Scheme scheme);

// Rows [begin, end) of keys and values (pass_query: of queries; heads, and inside the groups of hybrid: without rows, a
// share of the heads of all rows of `from`).
struct Transfer {
  int step = 0;  // done before the work of this step begins
  int from = 0;
  int to = 0;
  Rows rows;
  double bytes = 0;
  bool result = false;  // results return to their owner: partial results, gradients of K/V, heads of out
};

// One call of an engine: these queries against these keys, on the rank that holds one of them or has received it.
struct Tile {
  int step = 0;
  Rows queries;
  Rows keys;
  double pairs = 0;
};

struct Schedule {
  Scheme scheme = Scheme::ring;
  bool backward = false;
  Sizes sizes;
  Sharding sharding;
  Seen seen;
  int group = 1;                              // hybrid: ranks [g * group, (g + 1) * group) split the heads
  std::shared_ptr<const Schedule> ring = {};  // hybrid: of the groups, with all heads; its step n is step n + 1 here
  int steps = 1;                              // 0 .. steps - 1; no transfer belongs to step 0
  std::vector<Transfer> transfers = {};       // by receiver, then by step
  std::vector<std::size_t> received_at = {};  // where the transfers of each receiver begin; [ranks + 1]

  int ranks() const { return static_cast<int>(sharding.queries.size()); }
  std::span<const Transfer> received_by(int rank) const;
  // The work of a rank, by step. (heads and hybrid: of the rank's share of the heads.)
  std::vector<Tile> tiles(int rank) const;
};

// InvalidArgument if the shards do not hold every row once, or if the scheme needs more kv heads than there are. hybrid
// uses the largest groups that the ranks and kv heads allow, unless their size, a divisor of the ranks, is given.
Schedule schedule(Scheme scheme, const Sizes& sizes, const Seen& seen, const Sharding& sharding, bool backward = false,
                  int group = 0);

// The bytes of K and V (each row once to every other rank with a query that sees it) that any ring or all-gather needs.
double least_bytes(const Schedule& schedule);

// ---- What it costs ----

// The simulator's model of a cluster. A rank sends and receives at the same time, each at `bandwidth` inside its node;
// all transfers that leave a node, and all that enter it, share `node_bandwidth`.
struct Cluster {
  int ranks_per_node = 1;
  double flops = 5e10;     // of a rank, per second, as reached in attention
  double bandwidth = 5e9;  // bytes per second
  double latency = 2e-5;   // seconds, of a message
  double node_bandwidth = 12.5e9;
  double node_latency = 2e-5;
  double call = 3e-5;  // seconds that a call of an engine takes in addition to its FLOPs
  // Seconds of a rank's own processor for a byte that it sends or receives, in which it does not compute: packing,
  // merging, and a message layer in software. 0 for accelerators, whose links need no help.
  double handling = 0;
};

struct Estimate {
  double seconds = 0;
  double efficiency = 0;  // the FLOPs at full speed on all ranks, over `seconds` * ranks
  double imbalance = 0;   // the most pairs of a rank over the mean, minus 1
  double bytes = 0;       // over all links
  double most_bytes = 0;  // that one rank receives
  double waiting = 0;     // seconds that the slowest rank waits for data
};
Estimate simulate(const Schedule& schedule, const Cluster& cluster = {});

// The schedule with the least estimated time: for Scheme::automatic among the schemes that the sizes allow, for
// Scheme::hybrid among the group sizes.
Schedule plan(Scheme scheme, const Sizes& sizes, const Seen& seen, const Sharding& sharding,
              const Cluster& cluster = {}, bool backward = false);
// Its scheme, for Scheme::automatic.
Scheme choose(const Sizes& sizes, const Seen& seen, const Sharding& sharding, const Cluster& cluster = {},
              bool backward = false);

// A text with the scheme, its steps, balance, bytes of every link and estimated time, and why other schemes were not
// chosen. Runs nothing and needs no ranks.
std::string explain(Scheme scheme, const Sizes& sizes, const Seen& seen, const Sharding& sharding,
                    const Cluster& cluster = {}, bool backward = false);

// ---- The call ----

// A peer that failed, left, or did not answer in time.
class LostRank : public Error {
 public:
  using Error::Error;
};

// The message layer between ranks. All ranks call the same functions in the same order. Messages between two ranks
// arrive in the order in which they were sent.
class Transport {
 public:
  struct Message {
    int peer;
    void* data;
    std::size_t bytes;
    std::shared_ptr<const void> memory;  // owns the data: keep it until the message is complete, also after an error
  };

  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int ranks() const = 0;
  // Starts sends and receives; `wait` waits for all that were started. Throws LostRank.
  virtual void begin(std::span<const Message> sends, std::span<const Message> receives) = 0;
  virtual void wait() = 0;
  // Called from time to time while an engine computes, for message layers that only progress inside calls.
  virtual void progress() {}
  // The texts of all ranks, by rank.
  virtual std::vector<std::string> all_gather(const std::string& text) = 0;
};

struct Options {
  // These describe the whole sequence and are the same on every rank: valid_lens is [B] or [B, all queries], spans and
  // structured masks are for all queries and keys, and dropout uses positions in the whole sequence. Only bool masks
  // and biases differ between ranks: they broadcast to [B, H, this rank's queries, all keys]; packed they are whole, as
  // in attention_varlen.
  AttentionOptions attention = {};
  Scheme scheme = Scheme::automatic;
  std::optional<Sharding> sharding = {};  // when absent: contiguous, with the sizes of the ranks' tensors
  std::optional<Packing> packing = {};  // sequences of the whole pack; query [total,H,D] is then this rank's rows of it
  Cluster cluster = {};                 // for Scheme::automatic
};

// query [B,H,Sq_r,D], key [B,Hkv,Sk_r,D], value [B,Hkv,Sk_r,Dv], out [B,H,Sq_r,Dv], lse [B,H,Sq_r] of this rank's rows;
// packed [total_r,H,D] and lse [H,total_r]. Host memory. Every rank calls it. Arguments that must agree and do not are
// an InvalidArgument that names them, on every rank, before any row is sent.
void attention(ConstTensorView query, ConstTensorView key, ConstTensorView value, TensorView out, Transport& transport,
               const Options& options = {}, const AttentionOutputs& outputs = {});

// The gradients of this rank's rows. dsinks is that of the whole call, on every rank. So is dbias if the bias
// broadcasts over queries (it has one row on every rank, and some rank does not have exactly one query) or if the call
// is packed; otherwise dbias is for the rank's own rows.
void attention_backward(ConstTensorView grad_out, ConstTensorView query, ConstTensorView key, ConstTensorView value,
                        ConstTensorView out, ConstTensorView lse, const AttentionGradients& gradients,
                        Transport& transport, const Options& options = {});

// ---- One part, for programs that move keys themselves ----

// Attention of these queries over these keys, which are parts of a longer call: query 0 is at key position `offset`
// of this part, for causal (either alignment means the same here), window and alibi_slopes. out and lse are for
// these keys only; parts are merged by their lse.
void attention_part(ConstTensorView query, ConstTensorView key, ConstTensorView value, TensorView out,
                    std::int64_t offset, const AttentionOptions& options = {}, const AttentionOutputs& outputs = {});
// The contribution of these pairs to the gradients, from the out and lse of the whole rows.
void attention_part_backward(ConstTensorView grad_out, ConstTensorView query, ConstTensorView key,
                             ConstTensorView value, ConstTensorView out, ConstTensorView lse,
                             const AttentionGradients& gradients, std::int64_t offset,
                             const AttentionOptions& options = {});

}  // namespace headway::distributed
#pragma GCC visibility pop
