// The schedule as text: scheme, steps, balance, bytes of every link, time, and the other schemes beside it.
#include <algorithm>
#include <cmath>
#include <iomanip>
#include <map>
#include <sstream>

#include "core/text.h"
#include "distributed/schedule_parts.h"

namespace headway::distributed {
namespace {

std::string bytes_text(double bytes) {
  const char* units[] = {"B", "kB", "MB", "GB", "TB"};
  int unit = 0;
  while (bytes >= 999.5 && unit < 4) {
    bytes /= 1000;
    ++unit;
  }
  std::ostringstream stream;
  stream << std::setprecision(3) << bytes << ' ' << units[unit];
  return std::move(stream).str();
}

std::string seconds_text(double seconds) {
  std::ostringstream stream;
  stream << std::setprecision(3);
  if (seconds >= 1) {
    stream << seconds << " s";
  } else if (seconds >= 1e-3) {
    stream << seconds * 1e3 << " ms";
  } else {
    stream << seconds * 1e6 << " us";
  }
  return std::move(stream).str();
}

std::string percent(double share) {
  std::ostringstream stream;
  stream << std::fixed << std::setprecision(1) << share * 100 << " %";
  return std::move(stream).str();
}

// Every pair of ranks if there are few, else the busiest links.
void print_links(std::ostream& stream, const Schedule& schedule) {
  std::map<std::pair<int, int>, double> links;
  for (const Transfer& transfer : schedule.transfers) {
    links[{transfer.from, transfer.to}] += transfer.bytes;
  }
  if (links.empty()) {
    stream << "  links       none carries anything\n";
    return;
  }
  if (schedule.ranks() <= 8) {
    for (const auto& [ends, bytes] : links) {
      stream << "  link        " << ends.first << " -> " << ends.second << "  " << bytes_text(bytes) << '\n';
    }
    return;
  }
  const auto most =
      std::max_element(links.begin(), links.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  stream << "  links       " << links.size() << " of " << schedule.ranks() * (schedule.ranks() - 1)
         << " carry something; the busiest " << most->first.first << " -> " << most->first.second << " carries "
         << bytes_text(most->second) << '\n';
}

// hybrid with the size of its groups.
std::string title(const Schedule& plan) {
  return plan.scheme == Scheme::hybrid
             ? text("hybrid, heads in groups of ", plan.group, " and a ring of ", plan.ranks() / plan.group, " groups")
             : name(plan.scheme);
}

}  // namespace

std::string explain(Scheme scheme, const Sizes& sizes, const Seen& seen, const Sharding& sharding,
                    const Cluster& cluster, bool backward) {
  const bool chosen = scheme == Scheme::automatic;
  const Schedule plan = distributed::plan(scheme, sizes, seen, sharding, cluster, backward);
  const Estimate estimate = simulate(plan, cluster);
  const double all_pairs =
      static_cast<double>(sizes.batch) * static_cast<double>(sizes.queries) * static_cast<double>(sizes.keys);
  std::ostringstream stream;
  stream << "distributed attention" << (backward ? ", backward" : "") << ": " << title(plan)
         << (chosen ? " (chosen by estimated time)" : "") << ", " << plan.ranks() << " ranks, " << plan.steps
         << (plan.steps == 1 ? " step\n" : " steps\n");
  stream << "  work        " << percent(all_pairs > 0 ? seen.pairs() / all_pairs : 0) << " of the pairs; imbalance "
         << percent(estimate.imbalance) << '\n';
  stream << "  bytes       " << bytes_text(estimate.bytes) << " in all, at most " << bytes_text(estimate.most_bytes)
         << " to one rank; K and V once to every rank that sees them: " << bytes_text(least_bytes(plan)) << '\n';
  print_links(stream, plan);
  stream << "  time        " << seconds_text(estimate.seconds) << " estimated, efficiency "
         << percent(estimate.efficiency) << ", the slowest wait " << seconds_text(estimate.waiting) << '\n';
  for (const Scheme other : all_schemes) {
    if (other == plan.scheme) {
      continue;
    }
    stream << "  not " << std::left << std::setw(12) << name(other);
    if (const std::string reason = impossible(other, sizes, plan.ranks(), backward); !reason.empty()) {
      stream << reason << '\n';
    } else {
      const Schedule one = distributed::plan(other, sizes, seen, sharding, cluster, backward);
      const Estimate found = simulate(one, cluster);
      stream << seconds_text(found.seconds) << ", " << bytes_text(found.bytes)
             << (other == Scheme::hybrid ? text(", heads in groups of ", one.group) : "") << '\n';
    }
  }
  return std::move(stream).str();
}

}  // namespace headway::distributed
