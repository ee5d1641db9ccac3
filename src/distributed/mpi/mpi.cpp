#include "headway/mpi.h"

#include <algorithm>
#include <sstream>
#include <thread>

namespace headway::distributed {
namespace {

// MPI counts elements in an int.
constexpr std::size_t largest_message = std::size_t{1} << 30;

// Calls put(data, bytes) for a message in pieces that MPI can count. A message of 0 bytes is none.
template <class Put>
void in_pieces(const Transport::Message& message, const Put& put) {
  for (std::size_t at = 0; at < message.bytes; at += largest_message) {
    put(static_cast<std::byte*>(message.data) + at, static_cast<int>(std::min(largest_message, message.bytes - at)));
  }
}

// What was sent or received when a call gave up may still be read or written by MPI: such memory is never freed.
void keep_forever(std::shared_ptr<const void> memory) {
  static auto* kept = new std::vector<std::shared_ptr<const void>>;
  kept->push_back(std::move(memory));
}

}  // namespace

MpiTransport::MpiTransport(MPI_Comm communicator, std::chrono::milliseconds timeout)
    : communicator_(communicator), timeout_(timeout) {
  check(MPI_Comm_rank(communicator, &rank_));
  check(MPI_Comm_size(communicator, &ranks_));
}

MpiTransport::~MpiTransport() { give_up(); }

void MpiTransport::check(int code) const {
  if (code != MPI_SUCCESS) {
    char words[MPI_MAX_ERROR_STRING];
    int length = 0;
    MPI_Error_string(code, words, &length);
    throw LostRank("distributed: MPI failed: " + std::string(words, static_cast<std::size_t>(length)));
  }
}

void MpiTransport::give_up() noexcept {
  for (Pending& one : pending_) {
    if (one.request != MPI_REQUEST_NULL) {
      MPI_Cancel(&one.request);
      MPI_Request_free(&one.request);
      keep_forever(std::move(one.memory));
    }
  }
  pending_.clear();
}

void MpiTransport::begin(std::span<const Message> sends, std::span<const Message> receives) {
  for (const Message& message : receives) {
    in_pieces(message, [&](void* data, int bytes) {
      pending_.push_back({MPI_REQUEST_NULL, message.peer, message.memory});
      check(MPI_Irecv(data, bytes, MPI_BYTE, message.peer, mpi_tag, communicator_, &pending_.back().request));
    });
  }
  for (const Message& message : sends) {
    in_pieces(message, [&](const void* data, int bytes) {
      pending_.push_back({MPI_REQUEST_NULL, message.peer, message.memory});
      check(MPI_Isend(data, bytes, MPI_BYTE, message.peer, mpi_tag, communicator_, &pending_.back().request));
    });
  }
}

void MpiTransport::progress() {
  for (Pending& one : pending_) {
    int done = 0;
    check(MPI_Test(&one.request, &done, MPI_STATUS_IGNORE));  // a request that is done becomes MPI_REQUEST_NULL
  }
}

void MpiTransport::wait() {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  for (;;) {
    progress();
    const auto waiting = std::find_if(pending_.begin(), pending_.end(),
                                      [](const Pending& one) { return one.request != MPI_REQUEST_NULL; });
    if (waiting == pending_.end()) {
      pending_.clear();
      return;
    }
    const auto waited = Clock::now() - start;
    if (waited > timeout_) {
      const int peer = waiting->peer;
      give_up();
      std::ostringstream text;
      text << "distributed: rank " << peer << " has not answered rank " << rank_ << " for "
           << static_cast<double>(timeout_.count()) / 1000 << " s";
      throw LostRank(std::move(text).str());
    }
    // Spins while answers are near, then leaves the core to others: there may be more ranks than cores.
    if (waited > std::chrono::microseconds(200)) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
}

std::vector<std::string> MpiTransport::all_gather(const std::string& text) {
  const auto ranks = static_cast<std::size_t>(ranks_);
  const auto lengths = std::make_shared<std::vector<std::uint64_t>>(ranks, text.size());
  const auto mine = std::make_shared<std::uint64_t>(text.size());
  const auto texts = std::make_shared<std::vector<std::string>>(ranks, text);
  const auto sent = std::make_shared<std::string>(text);
  std::vector<Message> sends, receives;
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer != rank_) {
      sends.push_back({peer, mine.get(), sizeof(std::uint64_t), mine});
      receives.push_back({peer, &(*lengths)[static_cast<std::size_t>(peer)], sizeof(std::uint64_t), lengths});
    }
  }
  begin(sends, receives);
  wait();
  sends.clear();
  receives.clear();
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer != rank_) {
      const auto at = static_cast<std::size_t>(peer);
      (*texts)[at].resize((*lengths)[at]);
      sends.push_back({peer, sent->data(), sent->size(), sent});
      receives.push_back({peer, (*texts)[at].data(), (*texts)[at].size(), texts});
    }
  }
  begin(sends, receives);
  wait();
  return *texts;
}

void attention(ConstTensorView query, ConstTensorView key, ConstTensorView value, TensorView out, MPI_Comm communicator,
               const Options& options, const AttentionOutputs& outputs) {
  MpiTransport transport(communicator);
  attention(query, key, value, out, transport, options, outputs);
}

void attention_backward(ConstTensorView grad_out, ConstTensorView query, ConstTensorView key, ConstTensorView value,
                        ConstTensorView out, ConstTensorView lse, const AttentionGradients& gradients,
                        MPI_Comm communicator, const Options& options) {
  MpiTransport transport(communicator);
  attention_backward(grad_out, query, key, value, out, lse, gradients, transport, options);
}

}  // namespace headway::distributed
