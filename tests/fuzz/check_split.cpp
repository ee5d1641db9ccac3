// The same call split among 1 to 4 ranks, which are threads: any shards, any scheme that the call allows. The result is
// held to the bounds of one process, and to its own bits in a second run with more threads.
#include <exception>
#include <limits>

#include "distributed/split_on_threads.h"
#include "fuzz/check.h"
#include "headway/threads.h"

namespace headway::test::fuzz {
namespace {

using distributed::Rows;
using distributed::Shard;

class DrawSplit {
 public:
  explicit DrawSplit(Random& random) : random_(random) {}

  std::vector<Shard> shards(std::int64_t length, std::size_t ranks) {
    std::vector<Shard> all(ranks);
    const std::size_t kind = random_() % 4;
    if (kind == 0) return distributed::zigzag(length, length, static_cast<int>(ranks)).queries;
    if (kind == 1) {  // everything on one rank
      if (length > 0) all[random_() % ranks] = {{0, length}};
      return all;
    }
    // Pieces cut anywhere; rank after rank, or each on any rank and in any order there.
    const std::size_t pieces = kind == 2 ? ranks : 1 + random_() % (3 * ranks);
    std::vector<std::int64_t> cuts{0, length};
    while (cuts.size() < pieces + 1) cuts.push_back(static_cast<std::int64_t>(random_() % (length + 1)));
    std::sort(cuts.begin(), cuts.end());
    for (std::size_t n = 0; n < pieces; ++n) {
      const Rows rows{cuts[n], cuts[n + 1]};
      if (rows.count() > 0) all[kind == 2 ? n : random_() % ranks].push_back(rows);
    }
    if (kind == 3)
      for (Shard& shard : all) std::shuffle(shard.begin(), shard.end(), random_);
    return all;
  }

 private:
  Random& random_;
};

bool are_consecutive(const std::vector<Shard>& shards) {
  std::int64_t next = 0;
  for (const Shard& shard : shards)
    for (const Rows& rows : shard) {
      if (rows.begin != next) return false;
      next = rows.end;
    }
  return true;
}

std::string text_of(const std::vector<Shard>& shards) {
  std::ostringstream text;
  for (const Shard& shard : shards) {
    text << '[';
    for (const Rows& rows : shard) text << rows.begin << '-' << rows.end << (&rows == &shard.back() ? "" : " ");
    text << ']';
  }
  return text.str();
}

std::optional<Failure> same_again(const std::string& where, const SplitResults& a, const SplitResults& b) {
  const auto compare = [&](const char* name, const Tensor& one, const Tensor& other) -> std::optional<Failure> {
    if (const auto text = differing(one, other)) return Failure{"split, again, " + std::string(name), *text + where};
    return std::nullopt;
  };
  if (auto found = compare("out", a.forward.out, b.forward.out)) return found;
  if (auto found = compare("lse", a.forward.lse, b.forward.lse)) return found;
  const GradientTensors &first = *a.gradients, &second = *b.gradients;
  if (auto found = compare("dq", first.dq, second.dq)) return found;
  if (auto found = compare("dk", first.dk, second.dk)) return found;
  if (auto found = compare("dv", first.dv, second.dv)) return found;
  if (first.dbias)
    if (auto found = compare("dbias", *first.dbias, *second.dbias)) return found;
  if (first.dsinks) return compare("dsinks", *first.dsinks, *second.dsinks);
  return std::nullopt;
}

}  // namespace

std::optional<Failure> check_split(const Prepared& prepared, const Call& call) {
  // Open (docs/reliability.md): a part's lse may be a cap that no float holds.
  if (prepared.materials.has_infinities && call.options.softcap.value_or(0) > std::numeric_limits<float>::max() &&
      prepared.materials.what.type != DType::f64)
    return std::nullopt;
  Random random = stream(prepared.materials.what, 35);
  const std::size_t ranks = 1 + random() % 4;
  const int axis = call.packing ? 0 : call.q.rank() - 2;
  const std::int64_t kv_heads = call.packing || call.k.rank() == 4 ? call.k.size(1) : 1;
  DrawSplit draw(random);
  SplitCall split{call, {draw.shards(call.q.size(axis), ranks), draw.shards(call.k.size(axis), ranks)}};
  split.scheme = schemes[random() % std::size(schemes)];
  if (random() % 6 == 0 || !is_possible(split.scheme, call, kv_heads, static_cast<int>(ranks)))
    split.scheme = random() % 2 == 0 ? Scheme::automatic : schemes[random() % 2];
  split.give_sharding =
      !are_consecutive(split.sharding.queries) || !are_consecutive(split.sharding.keys) || random() % 2 == 0;
  const std::string where = " over " + std::to_string(ranks) + " ranks, " + distributed::name(split.scheme) +
                            ", queries " + text_of(split.sharding.queries) + ", keys " + text_of(split.sharding.keys);
  const ConstTensorView grad_out = prepared.materials.grad_out;
  const auto run = [&] { return run_split(split, static_cast<int>(ranks), &grad_out); };
  SplitResults results = run();
  const bool infinities = prepared.materials.has_infinities;
  if (const auto text = outside(results.forward.out, prepared.out, infinities))
    return Failure{"split, out", *text + where};
  if (const auto text = outside(results.forward.lse, prepared.lse, infinities))
    return Failure{"split, lse", *text + where};
  GradientTensors& gradients = *results.gradients;
  std::vector<TensorView> actual{gradients.dq, gradients.dk, gradients.dv};
  if (gradients.dbias) actual.push_back(*gradients.dbias);
  if (gradients.dsinks) actual.push_back(*gradients.dsinks);
  if (auto found = check_gradients(prepared, call, actual))
    return Failure{"split, " + found->check, found->text + where};
  set_threads(2 + static_cast<int>(random() % 3));
  const SplitResults again = run();
  set_threads(1);
  return same_again(where, again, results);
}

}  // namespace headway::test::fuzz
