// Distributed attention over MPI: every rank runs every test, and computes the whole call's expected result itself.
#include "headway/mpi.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <thread>

#include "split_sweep.h"

namespace headway::test {
namespace {

using distributed::MpiTransport;

TEST(DistributedMpi, computes_what_one_process_does) {
  MpiTransport transport(MPI_COMM_WORLD);
  int turn = 0;
  // The last one leaves ranks without queries, and under causal masks without a key that anyone sees.
  for (const auto& [queries, keys] : {std::pair<std::int64_t, std::int64_t>{45, 45}, {7, 61}, {2, 33}}) {
    const Shape shape{.batch = 2, .heads = 4, .kv_heads = 4, .queries = queries, .keys = keys};
    for (OptionSet& kind : all_kinds(shape)) {
      const bool has_matrix = kind.options.mask || kind.options.bias;
      const Scheme scheme = schemes[turn % (has_matrix ? 2 : transport.ranks() == 4 ? 5 : 4)];
      const distributed::Sharding sharding = turn % 2 == 0 ? distributed::zigzag(queries, keys, transport.ranks())
                                                           : distributed::contiguous(queries, keys, transport.ranks());
      const Inputs inputs = random_inputs(shape, float_types[static_cast<std::size_t>(turn) % 4]);
      const Call call = inputs.call(kind.options);
      Random random(5);
      const Tensor grad_out = normal(call.out_sizes(), call.q.dtype(), random);
      const ConstTensorView view = grad_out;
      SCOPED_TRACE(kind.name);
      const SplitCall split{call, sharding, scheme, turn % 2 == 0};
      expect_split(call, split.run(transport, &view), grad_out);
      ++turn;
    }
  }
}

TEST(DistributedMpi, every_pair_of_options_gives_what_one_process_does) {
  MpiTransport transport(MPI_COMM_WORLD);
  sweep_split_calls(transport.ranks(), [&](const SplitCall& split, ConstTensorView grad_out) {
    const SplitResults results = split.run(transport, &grad_out);
    if (transport.rank() == 0) expect_split(split.whole, results, grad_out);  // every rank has the whole result
  });
}

TEST(DistributedMpi, the_call_on_a_communicator_gives_the_same_bits_as_its_transport) {
  const Inputs inputs = random_inputs({.batch = 1, .heads = 2, .kv_heads = 2, .queries = 64, .keys = 64});
  MpiTransport transport(MPI_COMM_WORLD);
  const auto rank = static_cast<std::size_t>(transport.rank());
  const distributed::Sharding sharding = distributed::contiguous(64, 64, transport.ranks());
  const Tensor q = rows_of(inputs.q, 2, sharding.queries[rank]), k = rows_of(inputs.k, 2, sharding.keys[rank]);
  const Tensor v = rows_of(inputs.v, 2, sharding.keys[rank]);
  Tensor out({1, 2, q.size(2), v.size(3)}), again({1, 2, q.size(2), v.size(3)});
  distributed::attention(q, k, v, out, MPI_COMM_WORLD, {.scheme = Scheme::ring});
  distributed::attention(q, k, v, again, transport, {.scheme = Scheme::ring});
  EXPECT_TRUE(same_bits(out, again));
}

TEST(DistributedMpi, what_differs_is_named_on_every_rank) {
  MpiTransport transport(MPI_COMM_WORLD);
  if (transport.ranks() == 1) return;
  const Tensor q({1, 2, 4, transport.rank() == transport.ranks() - 1 ? 16 : 8});
  Tensor out(q.sizes());
  EXPECT_TRUE(throws<InvalidArgument>("distributed::attention", {"head_dim is 8 on rank 0 and 16 on rank"},
                                      [&] { distributed::attention(q, q, q, out, transport); }));
}

// The last tests: messages that nobody waits for stay behind on their communicators.

// A rank whose process the system stops (SIGSTOP) before it sends the rows of the ring's first step.
class StoppedRank : public MpiTransport {
 public:
  using MpiTransport::MpiTransport;
  void begin(std::span<const Message> sends, std::span<const Message> receives) override {
    if (++calls_ == 3) ::raise(SIGSTOP);  // the first two are of the agreement
    MpiTransport::begin(sends, receives);
  }

 private:
  int calls_ = 0;
};

TEST(DistributedMpi, y_a_stopped_process_is_lost_for_the_others_within_the_timeout) {
  MPI_Comm own;
  MPI_Comm_dup(MPI_COMM_WORLD, &own);
  constexpr auto timeout = std::chrono::milliseconds(400);
  MpiTransport transport(own, timeout);
  StoppedRank stopped(own, timeout);
  if (transport.ranks() > 1) {
    const std::vector<std::string> processes = transport.all_gather(std::to_string(::getpid()));
    const bool stops = transport.rank() == transport.ranks() - 1;
    const Tensor q({1, 2, 64, 8});
    Tensor out(q.sizes());
    const auto start = std::chrono::steady_clock::now();
    EXPECT_TRUE(throws<distributed::LostRank>("distributed", {"has not answered rank", "for 0.4 s"}, [&] {
      distributed::attention(q, q, q, out, stops ? stopped : transport, {.scheme = Scheme::ring});
    }));
    if (!stops) {
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
    }
    std::atomic<bool> done = false;
    std::thread waker([&, process = std::stoi(processes.back())] {  // more than once: it may stop late
      for (; transport.rank() == 0 && !done; std::this_thread::sleep_for(std::chrono::milliseconds(20)))
        ::kill(process, SIGCONT);
    });
    MPI_Barrier(MPI_COMM_WORLD);
    done = true;
    waker.join();
  }
}

TEST(DistributedMpi, z_a_rank_that_does_not_answer_is_lost) {
  MPI_Comm own;
  MPI_Comm_dup(MPI_COMM_WORLD, &own);
  MpiTransport transport(own, std::chrono::milliseconds(200));
  if (transport.ranks() > 1 && transport.rank() != transport.ranks() - 1) {
    const Tensor q({1, 2, 4, 8});
    Tensor out(q.sizes());
    try {
      distributed::attention(q, q, q, out, transport);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const distributed::LostRank& error) {
      EXPECT_NE(std::string(error.what()).find("has not answered"), std::string::npos);
    }
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

}  // namespace
}  // namespace headway::test

int main(int count, char** arguments) {
  MPI_Init(&count, &arguments);
  testing::InitGoogleTest(&count, arguments);
  const int failed = RUN_ALL_TESTS();
  MPI_Finalize();
  return failed;
}
