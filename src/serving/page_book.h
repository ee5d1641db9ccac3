// The bookkeeping of a KV cache: which page holds which tokens of which sequence. No keys, no arithmetic.
//
// A sequence is a table of page numbers; pages are shared between forks and counted. Only the page that holds a
// sequence's next token is ever written, so a page is copied at most then, and only if another sequence shares it.
// Every function checks before it changes anything: if it throws, nothing has changed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "headway/error.h"

namespace headway {

constexpr std::int32_t no_page = -1;  // in a table: its tokens have been freed

// Which keys a query at position p sees: those before `first`, and those from p - left on.
struct KeptKeys {
  std::optional<std::int64_t> left = {};  // all keys if absent
  std::int64_t first = 0;
  std::int64_t slack = 0;  // keys kept beyond what a query can see, for truncate

  // Whether none of the freed keys, `first` to `freed`, is among the keys before `end` that queries from p on see.
  bool all_seen_are_kept(std::int64_t p, std::int64_t end, std::int64_t freed) const {
    return !left || std::max(first, p - *left) >= std::min(end, freed);
  }
};

struct PagedSequence {
  std::int64_t length = 0;
  std::int64_t freed = 0;           // the tokens from `first` to here are gone; 0: none
  std::vector<std::int32_t> pages;  // of tokens n * page_size to (n + 1) * page_size; no_page where freed
};

// Tokens of one page that must be copied before anything is written.
struct PageCopy {
  std::int32_t from, to;
  std::int64_t slots;
};

class PageBook {
 public:
  PageBook(std::int64_t pages, std::int64_t page_size, const KeptKeys& kept);

  std::int64_t pages() const { return static_cast<std::int64_t>(holders_.size()); }
  std::int64_t page_size() const { return page_size_; }
  std::int64_t free_pages() const { return static_cast<std::int64_t>(free_.size()); }
  const KeptKeys& kept() const { return kept_; }
  // By id; ids count up and are never used again.
  const std::map<std::int64_t, PagedSequence>& sequences() const { return sequences_; }
  // UnknownSequence, beginning with the operation, if there is none.
  const PagedSequence& at(std::string_view operation, std::int64_t id) const;

  std::int64_t add();
  std::int64_t fork(std::string_view operation, std::int64_t id);
  void remove(std::string_view operation, std::int64_t id);
  void truncate(std::string_view operation, std::int64_t id, std::int64_t length);

  // Makes sequence ids[i] longer by counts[i] >= 0 tokens, after freeing the keys that no query from its old end on can
  // see (if there are any tokens). InvalidArgument if a sequence occurs twice, OutOfPages if there are too few pages.
  // The copies must be made before the new tokens are written.
  std::vector<PageCopy> append(std::string_view operation, std::span<const std::int64_t> ids,
                               std::span<const std::int64_t> counts);

  // Restores a saved, checked sequence and counts one more user of each of its pages. After the last one, sets the next
  // id.
  void restore(std::int64_t id, PagedSequence sequence);
  void finish_restoring(std::int64_t next_id);
  std::int64_t next_id() const { return next_id_; }

 private:
  struct Needs;  // of an append
  Needs needs_of(std::span<const std::int64_t> ids, std::span<const std::int64_t> counts) const;
  void check_appended(std::string_view operation, std::span<const std::int64_t> ids) const;
  // The value of `freed` of a sequence after an append of tokens.
  std::int64_t freed_by_append(const PagedSequence& sequence) const;
  // The table entries [begin, end) that such an append frees; some may hold no_page.
  std::pair<std::int64_t, std::int64_t> entries_freed_by_append(const PagedSequence& sequence) const;
  void free_unseen(PagedSequence& sequence);
  void extend(PagedSequence& sequence, std::int64_t count, std::vector<PageCopy>& copies);
  std::int64_t table_size(std::int64_t tokens) const { return tokens / page_size_ + (tokens % page_size_ != 0); }
  std::int32_t take();
  void release(std::int32_t page);
  void rebuild_free_list();

  std::int64_t page_size_;
  KeptKeys kept_;
  std::int64_t next_id_ = 0;
  std::map<std::int64_t, PagedSequence> sequences_;
  std::vector<std::int32_t> holders_;  // of each page: how many sequences
  std::vector<std::int32_t> free_;     // a stack: pages used last are used first, while they are in cache
};

}  // namespace headway
