// The order in which key tiles add to a query tile's gradient (engines/cuda/kernels/hopper_backward_order.h): each has
// its own place in it, nobody waits for ever, and in the common shapes nobody waits at all.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "engines/cuda/kernels/hopper_backward_order.h"

namespace headway::cuda {
namespace {

constexpr int unlimited = 1 << 29;

struct Addition {
  std::pair<int, int> to;  // query head and tile
  int rank;
};

// What each member of a team adds, in the order of its steps.
std::vector<std::vector<Addition>> additions(const BackwardSequence& sequence) {
  std::vector<std::vector<Addition>> all;
  const bool triangle = sequence.shape == TeamShape::triangle;
  for (int member = 0; member < sequence.members(); ++member) {
    const BackwardChunk chunk(sequence, member);
    std::vector<Addition>& own = all.emplace_back();
    const auto add = [&](int key_tile, bool second) {
      const BackwardWalk walk(sequence, chunk, key_tile, second);
      for (int step = 0; step < walk.steps(); ++step) {
        const BackwardPosition at = walk.position(step);
        own.push_back({{at.head, at.tile}, walk.rank(step, [&](int tile) { return walk.start_of(tile); })});
      }
    };
    add(triangle ? sequence.seen_tiles() - 1 - member : member, false);
    if (triangle && member < sequence.seen_tiles() / 2) add(member, true);
  }
  return all;
}

// Steps until all members of each chunk are done, when an addition takes one; -1 when they wait for each other.
int steps_taken(const BackwardSequence& sequence, const std::vector<std::vector<Addition>>& all) {
  std::map<std::pair<int, int>, int> turns;
  int steps = 0;
  for (std::size_t begin = 0; begin < all.size(); begin += static_cast<std::size_t>(sequence.chunk)) {
    const std::size_t end = std::min(all.size(), begin + static_cast<std::size_t>(sequence.chunk));
    std::vector<std::size_t> done(all.size(), 0);
    while (true) {
      std::vector<std::pair<int, int>> added;
      bool finished = true;
      for (std::size_t member = begin; member < end; ++member) {
        if (done[member] == all[member].size()) continue;
        finished = false;
        const Addition& next = all[member][done[member]];
        if (turns[next.to] == next.rank) {
          added.push_back(next.to);
          ++done[member];
        }
      }
      if (finished) break;
      if (added.empty()) return -1;
      for (const auto& to : added) ++turns[to];
      ++steps;
    }
  }
  return steps;
}

BackwardSequence random_sequence(std::mt19937& random) {
  const auto between = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  BackwardSequence one{};
  one.shape = static_cast<TeamShape>(between(0, 2));
  one.row_bits = static_cast<std::uint8_t>(between(6, 7));
  one.group = between(1, 4);
  one.real_queries = between(0, 1500);
  one.valid_keys = between(0, 3) == 0 ? one.real_queries : between(0, 3000);
  one.offset = between(0, 1) == 0 ? 0 : between(-1500, 3000);
  one.left = one.shape == TeamShape::band ? between(0, 700) : unlimited;
  one.right = one.shape == TeamShape::square || between(0, 2) == 0 ? unlimited : between(0, 300);
  if (one.shape == TeamShape::triangle && one.right == unlimited) one.right = 0;
  one.chunk = between(1, 20);
  return one;
}

TEST(BackwardOrder, gives_every_addition_to_a_tile_a_place_of_its_own) {
  std::mt19937 random(1);
  for (int run = 0; run < 3000; ++run) {
    const BackwardSequence sequence = random_sequence(random);
    std::map<std::pair<int, int>, std::vector<int>> ranks;
    for (const auto& member : additions(sequence))
      for (const Addition& one : member) ranks[one.to].push_back(one.rank);
    for (int head = 0; head < sequence.group; ++head)
      for (int tile = 0; tile < sequence.query_tiles(); ++tile) {
        std::vector<int> found = ranks[{head, tile}], expected(found.size());
        std::sort(found.begin(), found.end());
        for (std::size_t x = 0; x < expected.size(); ++x) expected[x] = static_cast<int>(x);
        ASSERT_EQ(found, expected) << "run " << run << ", head " << head << ", tile " << tile;
        ASSERT_EQ(static_cast<int>(found.size()), sequence.keys_of(tile).count());
      }
  }
}

TEST(BackwardOrder, lets_nobody_wait_for_ever) {
  std::mt19937 random(2);
  for (int run = 0; run < 3000; ++run) {
    const BackwardSequence sequence = random_sequence(random);
    ASSERT_GE(steps_taken(sequence, additions(sequence)), 0) << "run " << run;
  }
}

// Teams that share the query tiles of a sequence out have all of them together, each in an order of its own.
TEST(BackwardOrder, holds_for_each_of_the_teams_that_share_query_tiles_out) {
  std::mt19937 random(3);
  for (int run = 0; run < 3000; ++run) {
    BackwardSequence sequence = random_sequence(random);
    const int teams = std::uniform_int_distribution(1, 5)(random);
    std::map<std::pair<int, int>, std::vector<int>> ranks;
    int end = 0;
    for (int team = 0; team < teams; ++team) {
      sequence.share = query_share(sequence, team, teams);
      ASSERT_EQ(sequence.share.begin, end) << "run " << run;
      end = sequence.share.end;
      const auto all = additions(sequence);
      ASSERT_GE(steps_taken(sequence, all), 0) << "run " << run << ", team " << team;
      for (const auto& member : all)
        for (const Addition& one : member) {
          ASSERT_TRUE(sequence.share.begin <= one.to.second && one.to.second < sequence.share.end);
          ranks[one.to].push_back(one.rank);
        }
    }
    ASSERT_EQ(end, sequence.query_tiles());
    for (int head = 0; head < sequence.group; ++head)
      for (int tile = 0; tile < sequence.query_tiles(); ++tile) {
        std::vector<int> found = ranks[{head, tile}];
        std::sort(found.begin(), found.end());
        ASSERT_EQ(static_cast<int>(found.size()), sequence.keys_of(tile).count());
        for (std::size_t x = 0; x < found.size(); ++x) ASSERT_EQ(found[x], static_cast<int>(x)) << "run " << run;
      }
  }
}

TEST(BackwardOrder, hands_out_every_member_once_and_a_head_s_chunks_in_their_order) {
  for (const bool spread : {false, true})
    for (int heads : {1, 3, 8})
      for (int members : {1, 2, 7, 101})
        for (int chunk : {1, 2, 6, 128}) {
          std::map<std::pair<int, int>, int> taken;
          std::vector<int> next(static_cast<std::size_t>(heads), 0);  // chunk of each head
          int team = 0;
          for (int item = 0; item < heads * members; ++item) {
            const BackwardItem one = backward_item(item, heads * members, members, chunk, spread);
            ++taken[{one.head, one.member}];
            ASSERT_GE(one.team, team);
            ASSERT_LE(one.team, team + 1);
            team = one.team;
            int& own = next[static_cast<std::size_t>(one.head)];
            ASSERT_GE(one.member / chunk, own);
            own = one.member / chunk;
            ASSERT_LT(one.member, members);
          }
          ASSERT_EQ(taken.size(), static_cast<std::size_t>(heads * members)) << spread << heads << members << chunk;
        }
}

TEST(BackwardOrder, keeps_nobody_waiting_in_self_attention) {
  for (const bool causal : {false, true})
    for (int group : {1, 4})
      for (int row_bits : {6, 7})
        for (int length : {2048, 4000, 4096, 16384}) {
          BackwardSequence one{};
          one.shape = causal ? TeamShape::triangle : TeamShape::square;
          one.row_bits = static_cast<std::uint8_t>(row_bits);
          one.group = group;
          one.real_queries = one.valid_keys = length;
          one.left = unlimited;
          one.right = causal ? 0 : unlimited;
          one.chunk = largest_chunk;
          const auto all = additions(one);
          std::size_t longest = 0;
          for (const auto& member : all) longest = std::max(longest, member.size());
          EXPECT_EQ(steps_taken(one, all), static_cast<int>(longest))
              << causal << group << ' ' << row_bits << ' ' << length;
        }
}

}  // namespace
}  // namespace headway::cuda
