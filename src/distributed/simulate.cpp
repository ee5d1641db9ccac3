// The schedule on a cluster that need not be there: when each rank computes, waits and is done.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>

#include "distributed/schedule_parts.h"

namespace headway::distributed {
namespace {

// FLOPs of a pair of one head: two products forward, five backward.
double pair_flops(const Sizes& sizes, bool backward) {
  return 2.0 * static_cast<double>(sizes.head_dim + sizes.value_dim) * (backward ? 2.5 : 1.0);
}

// Every rank has a link in each direction, and so has every node. The transfers of a step share the links that they
// cross: one takes as long as the busiest of its links takes for all of its transfers.
class Links {
 public:
  Links(const Cluster& cluster, int ranks)
      : cluster_(cluster),
        per_node_(static_cast<std::size_t>(std::max(cluster.ranks_per_node, 1))),
        ranks_(static_cast<std::size_t>(ranks)),
        links_(2 * (ranks_ + (ranks_ + per_node_ - 1) / per_node_)) {}

  void begin_step(const std::vector<const Transfer*>& transfers) {
    for (Link& link : links_) {
      link.seconds = 0;
    }
    for (const Transfer* transfer : transfers) {
      each_link(*transfer, [&](Link& link, double bandwidth) { link.seconds += transfer->bytes / bandwidth; });
    }
  }

  // When a transfer of the step, which may begin at `ready`, has arrived.
  double arrival(const Transfer& transfer, double ready) {
    double seconds = 0;
    each_link(transfer, [&](Link& link, double) {
      ready = std::max(ready, link.free);
      seconds = std::max(seconds, link.seconds);
    });
    const double done = ready + seconds;
    each_link(transfer, [&](Link& link, double) { link.next_free = std::max(link.next_free, done); });
    return done + (crosses_nodes(transfer) ? cluster_.node_latency : cluster_.latency);
  }

  void end_step() {
    for (Link& link : links_) {
      link.free = link.next_free;
    }
  }

 private:
  struct Link {
    double seconds = 0;  // that it carries in this step
    double free = 0;     // when the steps before are through
    double next_free = 0;
  };

  bool crosses_nodes(const Transfer& transfer) const {
    return static_cast<std::size_t>(transfer.from) / per_node_ != static_cast<std::size_t>(transfer.to) / per_node_;
  }

  template <class Visit>
  void each_link(const Transfer& transfer, const Visit& visit) {
    const auto from = static_cast<std::size_t>(transfer.from), to = static_cast<std::size_t>(transfer.to);
    visit(links_[2 * from], cluster_.bandwidth);
    visit(links_[2 * to + 1], cluster_.bandwidth);
    if (crosses_nodes(transfer)) {
      visit(links_[2 * (ranks_ + from / per_node_)], cluster_.node_bandwidth);
      visit(links_[2 * (ranks_ + to / per_node_) + 1], cluster_.node_bandwidth);
    }
  }

  const Cluster& cluster_;
  std::size_t per_node_, ranks_;
  std::vector<Link> links_;  // out and in of every rank, then of every node
};

// Seconds of work of every rank in every step, and FLOPs of every rank.
struct Work {
  std::vector<std::vector<double>> seconds;  // [step][rank]
  std::vector<double> flops;                 // [rank]
};

Work work_of(const Schedule& schedule, const Cluster& cluster) {
  const auto ranks = static_cast<std::size_t>(schedule.ranks());
  Work work{std::vector(static_cast<std::size_t>(schedule.steps), std::vector<double>(ranks)),
            std::vector<double>(ranks)};
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const std::int64_t heads = heads_of(schedule, static_cast<int>(rank)).heads.count();
    const double of_pair = pair_flops(schedule.sizes, schedule.backward) * static_cast<double>(heads);
    for (const Tile& tile : schedule.tiles(static_cast<int>(rank))) {
      const double flops = tile.pairs * of_pair;
      work.flops[rank] += flops;
      work.seconds[static_cast<std::size_t>(tile.step)][rank] += flops / cluster.flops + cluster.call;
    }
  }
  for (const Transfer& transfer : schedule.transfers) {  // rows travel while the step before theirs is computed
    auto& during = work.seconds[static_cast<std::size_t>(std::max(transfer.step - (transfer.result ? 0 : 1), 0))];
    for (const int rank : {transfer.from, transfer.to}) {
      during[static_cast<std::size_t>(rank)] += transfer.bytes * cluster.handling;
    }
  }
  return work;
}

// Transfers by step; inside a step receiver after receiver.
std::vector<std::vector<const Transfer*>> by_step(const Schedule& schedule) {
  std::vector<std::vector<const Transfer*>> steps(static_cast<std::size_t>(schedule.steps));
  for (const Transfer& transfer : schedule.transfers) {
    steps[static_cast<std::size_t>(transfer.step)].push_back(&transfer);
  }
  return steps;
}

}  // namespace

Estimate simulate(const Schedule& schedule, const Cluster& cluster) {
  const auto ranks = static_cast<std::size_t>(schedule.ranks());
  const Work work = work_of(schedule, cluster);
  const auto transfers = by_step(schedule);
  Links links(cluster, schedule.ranks());
  // Of the step before: when each rank began it (and with it the transfers of the next one), and was done.
  std::vector<double> begun(ranks), done(ranks), waiting(ranks), received(ranks);
  Estimate estimate;
  for (std::size_t step = 0; step < work.seconds.size(); ++step) {
    std::vector<double> arrived(ranks), came_home(ranks);  // the step's work waits for the first, its end for both
    links.begin_step(transfers[step]);
    for (const Transfer* transfer : transfers[step]) {
      const auto from = static_cast<std::size_t>(transfer->from);
      const auto to = static_cast<std::size_t>(transfer->to);
      const double ready = transfer->result ? done[from] : std::max(begun[from], begun[to]);
      double& last = transfer->result ? came_home[to] : arrived[to];
      last = std::max(last, links.arrival(*transfer, ready));
      received[to] += transfer->bytes;
      estimate.bytes += transfer->bytes;
    }
    links.end_step();
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      begun[rank] = std::max(done[rank], arrived[rank]);
      waiting[rank] += begun[rank] - done[rank];
      done[rank] = std::max(begun[rank] + work.seconds[step][rank], came_home[rank]);
    }
  }
  estimate.seconds = *std::max_element(done.begin(), done.end());
  estimate.waiting = *std::max_element(waiting.begin(), waiting.end());
  estimate.most_bytes = *std::max_element(received.begin(), received.end());
  double all = 0;
  double most = 0;
  for (const double flops : work.flops) {
    all += flops;
    most = std::max(most, flops);
  }
  const auto number = static_cast<double>(ranks);
  estimate.imbalance = all > 0 ? most * number / all - 1 : 0;
  estimate.efficiency = estimate.seconds > 0 ? all / cluster.flops / number / estimate.seconds : 1;
  return estimate;
}

Schedule plan_among(std::span<const Scheme> schemes, const Sizes& sizes, const Seen& seen, const Sharding& sharding,
                    const Cluster& cluster, bool backward) {
  const int ranks = static_cast<int>(sharding.queries.size());
  std::optional<Schedule> best;
  double least = std::numeric_limits<double>::infinity();
  for (const Scheme scheme : schemes) {
    if (schemes.size() > 1 && !impossible(scheme, sizes, ranks, backward).empty()) {
      continue;
    }
    const std::vector<int> groups = group_sizes(sizes, ranks);
    const bool has_choice = scheme == Scheme::hybrid && !groups.empty();
    for (const int group : has_choice ? groups : std::vector<int>{0}) {
      Schedule one = schedule(scheme, sizes, seen, sharding, backward, group);
      const double seconds = simulate(one, cluster).seconds;
      if (!best || seconds < least) {
        least = seconds;
        best = std::move(one);
      }
    }
  }
  return std::move(*best);
}

Schedule plan(Scheme scheme, const Sizes& sizes, const Seen& seen, const Sharding& sharding, const Cluster& cluster,
              bool backward) {
  switch (scheme) {
    case Scheme::automatic: return plan_among(all_schemes, sizes, seen, sharding, cluster, backward);
    case Scheme::hybrid: return plan_among(std::span(&scheme, 1), sizes, seen, sharding, cluster, backward);
    default: return schedule(scheme, sizes, seen, sharding, backward);
  }
}

Scheme choose(const Sizes& sizes, const Seen& seen, const Sharding& sharding, const Cluster& cluster, bool backward) {
  return plan(Scheme::automatic, sizes, seen, sharding, cluster, backward).scheme;
}

}  // namespace headway::distributed
