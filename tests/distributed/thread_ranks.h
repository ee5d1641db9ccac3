// Ranks that are threads of one process: messages are copied through memory. Peers that fail or do not answer are a
// LostRank, as over a network.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "headway/distributed.h"

namespace headway::test {

class ThreadRanks {
 public:
  explicit ThreadRanks(int ranks, std::chrono::milliseconds timeout = std::chrono::seconds(60))
      : ranks_(ranks), timeout_(timeout) {}

  // Runs `work` once on every rank; the exceptions of the ranks, null where there was none.
  std::vector<std::exception_ptr> run(const std::function<void(distributed::Transport&)>& work) {
    std::vector<std::exception_ptr> errors(static_cast<std::size_t>(ranks_));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks_; ++rank) {
      threads.emplace_back([&, rank] {
        Rank transport(*this, rank);
        try {
          work(transport);
        } catch (...) {
          errors[static_cast<std::size_t>(rank)] = std::current_exception();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return errors;
  }

  double bytes() const { return bytes_; }  // that have been sent

 private:
  class Rank : public distributed::Transport {
   public:
    Rank(ThreadRanks& world, int rank) : world_(world), rank_(rank) {}
    int rank() const override { return rank_; }
    int ranks() const override { return world_.ranks_; }

    void begin(std::span<const Message> sends, std::span<const Message> receives) override {
      for (const Message& message : sends) {
        std::string data(message.bytes, '\0');
        if (message.bytes > 0) std::memcpy(data.data(), message.data, message.bytes);
        world_.bytes_ += static_cast<double>(message.bytes);
        send(message.peer, std::move(data));
      }
      receives_.insert(receives_.end(), receives.begin(), receives.end());
    }
    void wait() override {
      for (const Message& message : receives_) {
        const std::string data = receive(message.peer);
        if (data.size() != message.bytes) throw std::logic_error("a message of another size");
        if (!data.empty()) std::memcpy(message.data, data.data(), data.size());
      }
      receives_.clear();
    }
    std::vector<std::string> all_gather(const std::string& text) override {
      std::vector<std::string> texts(static_cast<std::size_t>(ranks()));
      for (int peer = 0; peer < ranks(); ++peer)
        if (peer != rank_) send(peer, text);
      for (int peer = 0; peer < ranks(); ++peer)
        texts[static_cast<std::size_t>(peer)] = peer == rank_ ? text : receive(peer);
      return texts;
    }

   private:
    void send(int peer, std::string data) {
      const std::lock_guard lock(world_.mutex_);
      world_.mail_[{rank_, peer}].push_back(std::move(data));
      world_.arrived_.notify_all();
    }
    std::string receive(int peer) {
      std::unique_lock lock(world_.mutex_);
      auto& queue = world_.mail_[{peer, rank_}];
      if (!world_.arrived_.wait_for(lock, world_.timeout_, [&] { return !queue.empty(); }))
        throw distributed::LostRank("rank " + std::to_string(peer) + " does not answer");
      std::string data = std::move(queue.front());
      queue.pop_front();
      return data;
    }

    ThreadRanks& world_;
    int rank_;
    std::vector<Message> receives_;
  };

  int ranks_;
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<std::pair<int, int>, std::deque<std::string>> mail_;
  std::atomic<double> bytes_ = 0;
};

}  // namespace headway::test
