// The cache's bookkeeping against a simple model: random operations, and no error changes anything.
#include "serving/page_book.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace headway {
namespace {

// A sequence as the list of its tokens, and its pages as plain numbers from an endless supply: which sequences share a
// page is found by looking at all of them.
struct ModelSequence {
  std::vector<int> tokens;  // each token ever appended has a number of its own
  std::vector<int> pages;   // -1: freed
  std::int64_t freed = 0;
};

struct Model {
  std::int64_t page_size;
  KeptKeys kept;
  std::map<std::int64_t, ModelSequence> sequences;
  int next_page = 0;

  std::int64_t pages_held() const {
    std::set<int> held;
    for (const auto& [id, sequence] : sequences) {
      held.insert(sequence.pages.begin(), sequence.pages.end());
    }
    held.erase(-1);
    return static_cast<std::int64_t>(held.size());
  }
  int holders(int page) const {
    int count = 0;
    for (const auto& [id, sequence] : sequences) {
      count += static_cast<int>(std::count(sequence.pages.begin(), sequence.pages.end(), page));
    }
    return count;
  }
  bool is_freed(const ModelSequence& sequence, std::int64_t token) const {
    return token >= kept.first && token < sequence.freed;
  }
  void free_unseen(ModelSequence& sequence) {
    if (!kept.left) {
      return;
    }
    const auto next = static_cast<std::int64_t>(sequence.tokens.size());
    for (std::int64_t token = kept.first; token < next; ++token) {
      if (token < next - *kept.left - kept.slack) {
        sequence.freed = std::max(sequence.freed, token + 1);
      }
    }
    for (std::size_t n = 0; n < sequence.pages.size(); ++n) {
      bool needed = false;
      for (std::int64_t token = static_cast<std::int64_t>(n) * page_size;
           token < static_cast<std::int64_t>(n + 1) * page_size; ++token) {
        needed = needed || !is_freed(sequence, token);
      }
      sequence.pages[n] = needed ? sequence.pages[n] : -1;
    }
  }
  void append(const std::vector<std::int64_t>& ids, const std::vector<std::vector<int>>& tokens) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (!tokens[i].empty()) {
        free_unseen(sequences.at(ids[i]));
      }
    }
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ModelSequence& sequence = sequences.at(ids[i]);
      for (const int token : tokens[i]) {
        if (static_cast<std::int64_t>(sequence.tokens.size()) % page_size == 0) {
          sequence.pages.push_back(next_page++);
        } else if (sequence.pages.back() == -1 || holders(sequence.pages.back()) > 1) {
          sequence.pages.back() = next_page++;
        }
        sequence.tokens.push_back(token);
      }
    }
  }
  // Whether the next query, at `length`, and those after it see no freed key.
  bool can_truncate(const ModelSequence& sequence, std::int64_t length) const {
    for (std::int64_t token = 0; token < length; ++token) {
      if (is_freed(sequence, token) && token >= length - *kept.left) {
        return false;
      }
    }
    return true;
  }
};

class Pair {
 public:
  Pair(std::int64_t pages, std::int64_t page_size, const KeptKeys& kept, unsigned seed)
      : book_(pages, page_size, kept), slots_(static_cast<std::size_t>(pages * page_size), -1), random_(seed) {
    model_.page_size = page_size;
    model_.kept = kept;
  }

  void step() {
    const int action = below(20);
    if (action < 2 && model_.sequences.size() < 12) {
      const std::int64_t id = book_.add();
      ASSERT_TRUE(model_.sequences.emplace(id, ModelSequence{}).second) << "an id was given twice";
    } else if (action < 4 && model_.sequences.size() < 12) {
      fork();
    } else if (action < 5) {
      remove();
    } else if (action < 8) {
      truncate();
    } else {
      append();
    }
  }

  void compare() {
    ASSERT_EQ(book_.free_pages(), book_.pages() - model_.pages_held());
    ASSERT_EQ(book_.sequences().size(), model_.sequences.size());
    for (const auto& [id, expected] : model_.sequences) {
      const PagedSequence& found = book_.at("test", id);
      ASSERT_EQ(found.length, static_cast<std::int64_t>(expected.tokens.size()));
      for (std::int64_t token = 0; token < found.length; ++token) {
        if (model_.is_freed(expected, token)) {
          continue;
        }
        ASSERT_EQ(slot(found, token), expected.tokens[static_cast<std::size_t>(token)]) << "token " << token;
      }
      for (std::size_t n = 0; n < found.pages.size(); ++n) {
        ASSERT_EQ(found.pages[n] == no_page, expected.pages[n] == -1) << "page " << n;
      }
    }
  }

  int refused = 0, done = 0;

 private:
  int below(int count) { return static_cast<int>(random_() % static_cast<unsigned>(count)); }

  // A sequence that is there, or now and then one that is not.
  std::int64_t any_id() {
    if (model_.sequences.empty() || below(50) == 0) {
      return 1'000'000 + below(3);
    }
    auto place = model_.sequences.begin();
    std::advance(place, below(static_cast<int>(model_.sequences.size())));
    return place->first;
  }
  bool exists(std::int64_t id) const { return model_.sequences.count(id) == 1; }

  int& slot(const PagedSequence& sequence, std::int64_t token) {
    const std::int64_t page = sequence.pages.at(static_cast<std::size_t>(token / book_.page_size()));
    return slots_.at(static_cast<std::size_t>(page * book_.page_size() + token % book_.page_size()));
  }

  void fork() {
    const std::int64_t id = any_id();
    if (!exists(id)) {
      EXPECT_THROW(book_.fork("test", id), UnknownSequence);
      return;
    }
    const std::int64_t made = book_.fork("test", id);
    ASSERT_TRUE(model_.sequences.emplace(made, model_.sequences.at(id)).second);
  }

  void remove() {
    const std::int64_t id = any_id();
    if (!exists(id)) {
      EXPECT_THROW(book_.remove("test", id), UnknownSequence);
      return;
    }
    book_.remove("test", id);
    model_.sequences.erase(id);
    EXPECT_THROW(book_.at("test", id), UnknownSequence);
  }

  void truncate() {
    const std::int64_t id = any_id();
    if (!exists(id)) {
      EXPECT_THROW(book_.truncate("test", id, 0), UnknownSequence);
      return;
    }
    ModelSequence& sequence = model_.sequences.at(id);
    const auto size = static_cast<int>(sequence.tokens.size());
    const int length = below(4) == 0 ? below(size + 3) - 1 : std::max(0, size - below(6));
    if (length < 0 || length > size || (model_.kept.left && !model_.can_truncate(sequence, length))) {
      EXPECT_THROW(book_.truncate("test", id, length), InvalidArgument);
      ++refused;
      return;
    }
    book_.truncate("test", id, length);
    sequence.tokens.resize(static_cast<std::size_t>(length));
    sequence.pages.resize(static_cast<std::size_t>((length + model_.page_size - 1) / model_.page_size));
    sequence.freed = std::min<std::int64_t>(sequence.freed, length);
    ++done;
  }

  void append() {
    std::vector<std::int64_t> ids;
    std::vector<std::int64_t> counts;
    std::vector<std::vector<int>> tokens;
    const int sequences = 1 + below(4);
    bool legal = true, unknown = false;
    for (int i = 0; i < sequences; ++i) {
      const std::int64_t id = any_id();
      const bool twice = std::find(ids.begin(), ids.end(), id) != ids.end();
      if (twice && below(10) != 0) {
        continue;
      }
      legal = legal && exists(id) && !twice;
      unknown = unknown || !exists(id);
      ids.push_back(id);
      counts.push_back(below(3) == 0 ? below(12) : below(3));
      tokens.emplace_back();
      for (std::int64_t n = 0; n < counts.back(); ++n) {
        tokens.back().push_back(next_token_++);
      }
    }
    if (!legal) {
      EXPECT_THROW(book_.append("test", ids, counts), InvalidArgument);
      return;
    }
    Model after = model_;
    after.append(ids, tokens);
    if (after.pages_held() > book_.pages()) {
      EXPECT_THROW(book_.append("test", ids, counts), OutOfPages);
      ++refused;
      return;
    }
    for (const PageCopy& copy : book_.append("test", ids, counts)) {
      for (std::int64_t s = 0; s < copy.slots; ++s) {
        slots_.at(static_cast<std::size_t>(copy.to * book_.page_size() + s)) =
            slots_.at(static_cast<std::size_t>(copy.from * book_.page_size() + s));
      }
    }
    model_ = std::move(after);
    ++done;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const PagedSequence& sequence = book_.at("test", ids[i]);
      for (std::int64_t n = 0; n < counts[i]; ++n) {
        slot(sequence, sequence.length - counts[i] + n) = tokens[i][static_cast<std::size_t>(n)];
      }
    }
  }

  PageBook book_;
  Model model_;
  std::vector<int> slots_;  // [pages, page_size]: the token in each
  std::mt19937 random_;
  int next_token_ = 0;
};

TEST(PageBook, a_hundred_thousand_random_operations_match_a_simple_model) {
  int steps = 0, refused = 0, done = 0;
  unsigned seed = 0;
  const KeptKeys all{}, window{.left = 7}, sinks{.left = 5, .first = 3}, slack{.left = 4, .first = 6, .slack = 5},
      narrow{.left = 0, .first = 1};
  for (const KeptKeys& kept : {all, window, sinks, slack, narrow}) {
    for (const std::int64_t page_size : {1, 3, 4, 16}) {
      for (int run = 0; run < 6; ++run) {
        Pair pair(160 / page_size, page_size, kept, ++seed);
        for (int i = 0; i < 1000; ++i, ++steps) {
          pair.step();
          pair.compare();
          if (testing::Test::HasFatalFailure()) {
            FAIL() << "seed " << seed << ", step " << i << ", page size " << page_size;
          }
        }
        refused += pair.refused;
        done += pair.done;
      }
    }
  }
  EXPECT_GE(steps, 100'000);
  EXPECT_GT(refused, 1000);
  EXPECT_GT(done, 20'000);
}

TEST(PageBook, forks_share_pages_until_one_of_them_writes) {
  PageBook book(4, 4, {});
  const std::int64_t first = book.add();
  book.append("test", std::vector{first}, std::vector<std::int64_t>{6});
  const std::int64_t second = book.fork("test", first);
  EXPECT_EQ(book.free_pages(), 2);
  const std::vector<PageCopy> copies = book.append("test", std::vector{second}, std::vector<std::int64_t>{1});
  ASSERT_EQ(copies.size(), 1u);
  EXPECT_EQ(copies[0].slots, 2);
  EXPECT_EQ(book.free_pages(), 1);
  EXPECT_TRUE(book.append("test", std::vector{first}, std::vector<std::int64_t>{1}).empty());  // alone by now
}

TEST(PageBook, two_forks_that_write_in_one_call_need_one_copy) {
  PageBook book(3, 4, {});
  const std::int64_t first = book.add();
  book.append("test", std::vector{first}, std::vector<std::int64_t>{6});
  const std::int64_t second = book.fork("test", first);
  EXPECT_EQ(book.append("test", std::vector{first, second}, std::vector<std::int64_t>{1, 1}).size(), 1u);
  EXPECT_EQ(book.free_pages(), 0);
}

TEST(PageBook, pages_that_an_append_frees_serve_the_same_append) {
  PageBook book(3, 2, {.left = 2});
  const std::int64_t id = book.add();
  for (int i = 0; i < 50; ++i) {
    book.append("test", std::vector{id}, std::vector<std::int64_t>{1});
  }
  EXPECT_EQ(book.at("test", id).length, 50);
}

}  // namespace
}  // namespace headway
