#include "serving/page_book.h"

#include <unordered_map>
#include <unordered_set>

#include "core/text.h"

namespace headway {

// The pages that an append would take and free.
struct PageBook::Needs {
  std::int64_t taken = 0, freed = 0;
};

PageBook::PageBook(std::int64_t pages, std::int64_t page_size, const KeptKeys& kept)
    : page_size_(page_size), kept_(kept), holders_(static_cast<std::size_t>(pages), 0) {
  free_.reserve(holders_.size());
  rebuild_free_list();
}

void PageBook::rebuild_free_list() {
  free_.clear();
  for (std::int64_t page = pages(); page-- > 0;) {
    if (holders_[static_cast<std::size_t>(page)] == 0) {
      free_.push_back(static_cast<std::int32_t>(page));
    }
  }
}

std::int32_t PageBook::take() {
  const std::int32_t page = free_.back();
  free_.pop_back();
  holders_[static_cast<std::size_t>(page)] = 1;
  return page;
}

void PageBook::release(std::int32_t page) {
  if (page != no_page && --holders_[static_cast<std::size_t>(page)] == 0) {
    free_.push_back(page);  // within its capacity, which is that of all pages
  }
}

const PagedSequence& PageBook::at(std::string_view operation, std::int64_t id) const {
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) {
    throw UnknownSequence(text(operation, ": there is no sequence ", id, id >= 0 && id < next_id_ ? " any more" : ""));
  }
  return found->second;
}

std::int64_t PageBook::add() {
  sequences_.emplace(next_id_, PagedSequence{});
  return next_id_++;
}

std::int64_t PageBook::fork(std::string_view operation, std::int64_t id) {
  const auto made = sequences_.emplace(next_id_, at(operation, id)).first;
  for (const std::int32_t page : made->second.pages) {
    if (page != no_page) {
      ++holders_[static_cast<std::size_t>(page)];
    }
  }
  return next_id_++;
}

void PageBook::remove(std::string_view operation, std::int64_t id) {
  for (const std::int32_t page : at(operation, id).pages) {
    release(page);
  }
  sequences_.erase(id);
}

void PageBook::truncate(std::string_view operation, std::int64_t id, std::int64_t length) {
  const PagedSequence& found = at(operation, id);
  if (length < 0 || length > found.length) {
    throw InvalidArgument(
        text(operation, ": expected a length of 0 to ", found.length, " for sequence ", id, ", found ", length));
  }
  if (!kept_.all_seen_are_kept(length, length, found.freed)) {
    throw InvalidArgument(text(operation, ": sequence ", id, " cannot go back to length ", length,
                               ": the next query would see keys from ", std::max(kept_.first, length - *kept_.left),
                               " on, and keys ", kept_.first, " to ", found.freed - 1,
                               " have been freed; slack keeps more"));
  }
  PagedSequence& sequence = sequences_.find(id)->second;
  const auto kept_entries = static_cast<std::size_t>(table_size(length));
  for (std::size_t n = kept_entries; n < sequence.pages.size(); ++n) {
    release(sequence.pages[n]);
  }
  sequence.pages.resize(kept_entries);
  sequence.length = length;
  sequence.freed = std::min(sequence.freed, length) <= kept_.first ? 0 : std::min(sequence.freed, length);
}

std::int64_t PageBook::freed_by_append(const PagedSequence& sequence) const {
  if (!kept_.left) {
    return 0;
  }
  const std::int64_t unseen = std::max<std::int64_t>(sequence.length - *kept_.left, 0);
  const std::int64_t freed = unseen > kept_.slack ? std::max(sequence.freed, unseen - kept_.slack) : sequence.freed;
  return freed <= kept_.first ? 0 : freed;
}

std::pair<std::int64_t, std::int64_t> PageBook::entries_freed_by_append(const PagedSequence& sequence) const {
  const std::int64_t end = freed_by_append(sequence) / page_size_;
  const std::int64_t begin = std::max(table_size(kept_.first), sequence.freed / page_size_);
  return {std::min(begin, end), end};
}

void PageBook::check_appended(std::string_view operation, std::span<const std::int64_t> ids) const {
  std::unordered_set<std::int64_t> seen;
  for (const std::int64_t id : ids) {
    at(operation, id);
    if (!seen.insert(id).second) {
      throw InvalidArgument(text(operation, ": expected each sequence once, found ", id, " twice"));
    }
  }
}

PageBook::Needs PageBook::needs_of(std::span<const std::int64_t> ids, std::span<const std::int64_t> counts) const {
  std::unordered_map<std::int32_t, std::int32_t> released;  // by page: how many of its holders this append frees
  std::unordered_map<std::int32_t, std::int32_t> written;   // by page: how many sequences would write to it
  Needs needs;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (counts[i] == 0) {
      continue;
    }
    const PagedSequence& sequence = sequences_.find(ids[i])->second;
    const auto [begin, end] = entries_freed_by_append(sequence);
    for (std::int64_t n = begin; n < end; ++n) {
      const std::int32_t page = sequence.pages[static_cast<std::size_t>(n)];
      if (page != no_page && ++released[page] == holders_[static_cast<std::size_t>(page)]) {
        ++needs.freed;
      }
    }
    needs.taken += table_size(sequence.length + counts[i]) - table_size(sequence.length);
    if (sequence.length % page_size_ != 0) {
      if (sequence.pages.back() == no_page) {
        ++needs.taken;
      } else {
        ++written[sequence.pages.back()];
      }
    }
  }
  for (const auto& [page, writers] : written) {
    const auto other = released.find(page);
    const std::int32_t holders =
        holders_[static_cast<std::size_t>(page)] - (other == released.end() ? 0 : other->second);
    needs.taken += std::min(writers, holders - 1);  // if only writers hold it, the last of them needs no copy
  }
  return needs;
}

std::vector<PageCopy> PageBook::append(std::string_view operation, std::span<const std::int64_t> ids,
                                       std::span<const std::int64_t> counts) {
  check_appended(operation, ids);
  const Needs needs = needs_of(ids, counts);
  if (needs.taken > free_pages() + needs.freed) {
    throw OutOfPages(text(operation, ": ", needs.taken, needs.taken == 1 ? " page of " : " pages of ", page_size_,
                          page_size_ == 1 ? " token " : " tokens ", needs.taken == 1 ? "is" : "are", " needed, ",
                          free_pages() + needs.freed, " of ", pages(), " are free"));
  }
  std::vector<PageCopy> copies;
  copies.reserve(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    std::vector<std::int32_t>& table = sequences_.find(ids[i])->second.pages;
    const auto size = static_cast<std::size_t>(table_size(sequences_.find(ids[i])->second.length + counts[i]));
    if (size > table.capacity()) {
      table.reserve(std::max(size, 2 * table.capacity()));
    }
  }
  // From here on nothing throws.
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (counts[i] > 0) {
      free_unseen(sequences_.find(ids[i])->second);
    }
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (counts[i] > 0) {
      extend(sequences_.find(ids[i])->second, counts[i], copies);
    }
  }
  return copies;
}

void PageBook::free_unseen(PagedSequence& sequence) {
  const auto [begin, end] = entries_freed_by_append(sequence);
  for (std::int64_t n = begin; n < end; ++n) {
    release(std::exchange(sequence.pages[static_cast<std::size_t>(n)], no_page));
  }
  sequence.freed = freed_by_append(sequence);
}

void PageBook::extend(PagedSequence& sequence, std::int64_t count, std::vector<PageCopy>& copies) {
  if (const std::int64_t slots = sequence.length % page_size_; slots != 0) {
    std::int32_t& last = sequence.pages.back();
    if (last == no_page) {
      last = take();
    } else if (holders_[static_cast<std::size_t>(last)] > 1) {
      copies.push_back({.from = last, .to = take(), .slots = slots});
      release(std::exchange(last, copies.back().to));
    }
  }
  sequence.length += count;
  while (static_cast<std::int64_t>(sequence.pages.size()) < table_size(sequence.length)) {
    sequence.pages.push_back(take());
  }
}

void PageBook::restore(std::int64_t id, PagedSequence sequence) {
  const auto made = sequences_.emplace(id, std::move(sequence)).first;
  for (const std::int32_t page : made->second.pages) {
    if (page != no_page) {
      ++holders_[static_cast<std::size_t>(page)];
    }
  }
}

void PageBook::finish_restoring(std::int64_t next_id) {
  next_id_ = next_id;
  rebuild_free_list();
}

}  // namespace headway
