// Distributed attention over MPI. Links with headway::mpi (find_package(headway COMPONENTS mpi)).
#pragma once

#if __cplusplus >= 202002L  // an older language level is told so by the headers below, before it looks for MPI
#include <mpi.h>
#endif

#include <chrono>
#include <vector>

#include "headway/cxx20.h"
#include "headway/distributed.h"

#pragma GCC visibility push(default)
namespace headway::distributed {

// Messages of one communicator. They have one tag (mpi_tag), which the program must not use on it. Calls must not
// overlap on a communicator, and MPI must have been initialised; MPI_THREAD_FUNNELED is enough, from the thread that
// calls MPI.
inline constexpr int mpi_tag = 18501;

class MpiTransport : public Transport {
 public:
  // A peer that does not answer for this time is a LostRank. MPI's own errors go to the communicator's error handler
  // first.
  explicit MpiTransport(MPI_Comm communicator, std::chrono::milliseconds timeout = std::chrono::seconds(60));
  ~MpiTransport() override;

  int rank() const override { return rank_; }
  int ranks() const override { return ranks_; }
  void begin(std::span<const Message> sends, std::span<const Message> receives) override;
  void wait() override;
  void progress() override;
  std::vector<std::string> all_gather(const std::string& text) override;

 private:
  struct Pending {
    MPI_Request request;
    int peer;
    std::shared_ptr<const void> memory;
  };
  void check(int code) const;
  void give_up() noexcept;

  MPI_Comm communicator_;
  std::chrono::milliseconds timeout_;
  int rank_ = 0;
  int ranks_ = 1;
  std::vector<Pending> pending_;
};

// The calls of headway/distributed.h with the ranks of a communicator.
void attention(ConstTensorView query, ConstTensorView key, ConstTensorView value, TensorView out, MPI_Comm communicator,
               const Options& options = {}, const AttentionOutputs& outputs = {});
void attention_backward(ConstTensorView grad_out, ConstTensorView query, ConstTensorView key, ConstTensorView value,
                        ConstTensorView out, ConstTensorView lse, const AttentionGradients& gradients,
                        MPI_Comm communicator, const Options& options = {});

}  // namespace headway::distributed
#pragma GCC visibility pop
