// mpirun headway attend: ranks read and write their rows, and fail together.
#include <unistd.h>

#include "cli_support.h"
#include "support/call.h"

namespace headway::test {
namespace {

class AttendOnRanks : public CommandTest {
 protected:
  AttendOnRanks() {
    for (const char* name : {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "HEADWAY_THREADS"})
      ::setenv(name, "1", 1);
  }

  Finished run_on(int ranks, const Arguments& arguments, const Arguments& before = {HEADWAY_COMMAND}) const {
    return run_child([&] {
      Arguments all = {HEADWAY_MPIEXEC, "--oversubscribe", "--bind-to", "none", "-n", std::to_string(ranks)};
      all.insert(all.end(), before.begin(), before.end());
      all.insert(all.end(), arguments.begin(), arguments.end());
      std::vector<char*> words;
      for (std::string& one : all) words.push_back(one.data());
      words.push_back(nullptr);
      ::execvp(words[0], words.data());
      ::_exit(127);
    });
  }

  void expect_written(const Call& call, const Finished& finished) const {
    ASSERT_EQ(finished.code, 0) << finished.err;
    Tensor out = load_npy(file("out.npy")), lse = load_npy(file("lse.npy"));
    expect_forward(call, out.view(), {.lse = lse.view()});
    EXPECT_EQ(files().size(), 7U);  // and no temporary file
    std::filesystem::remove(file("out.npy"));
    std::filesystem::remove(file("lse.npy"));
  }
};

TEST_F(AttendOnRanks, one_to_four_ranks_write_what_one_process_does) {
  const Tensor q = save_random("q.npy", {2, 4, 37, 8}, 1), k = save_random("k.npy", {2, 4, 37, 8}, 2);
  const Tensor v = save_random("v.npy", {2, 4, 37, 6}, 3);
  const Tensor bias = save_random("bias.npy", {4, 37, 37}, 4), row = save_random("row.npy", {1, 37}, 5);
  const Arguments call = {"attend", "q.npy", "k.npy", "v.npy", "-o", "out.npy", "--lse", "lse.npy"};
  const auto with = [&](const Arguments& more) {
    Arguments all = call;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  for (int ranks = 1; ranks <= 4; ++ranks) {
    SCOPED_TRACE(ranks);
    expect_written({q, k, v, {.causal = Causal::square}}, run_on(ranks, with({"--causal"})));
    expect_written({q, k, v, {.bias = bias, .dropout = 0.25, .seed = 7}},
                   run_on(ranks, with({"--bias", "bias.npy", "--dropout", "0.25", "--seed", "7"})));
    expect_written({q, k, v, {.bias = row, .window = Window{5, 3}}},
                   run_on(ranks, with({"--bias", "row.npy", "--window", "5,3"})));
  }
}

TEST_F(AttendOnRanks, arrays_with_joined_heads_are_cut_by_their_rows) {
  const Tensor x = save_random("x.npy", {11, 12}, 1);
  const Finished finished = run_on(3, {"attend", "x.npy", "x.npy", "x.npy", "-o", "out.npy", "--heads", "3"});
  ASSERT_EQ(finished.code, 0) << finished.err;
  EXPECT_EQ(finished.out.rfind("out.npy  (11, 12) f32  3 ranks  ", 0), 0U) << finished.out;
  const Tensor out = load_npy(file("out.npy"));
  const auto heads = [](const Tensor& rows) { return rows.view().unflatten(1, {3, 4}).transpose(0, 1).unsqueeze(0); };
  expect_forward({heads(x), heads(x), heads(x)}, convert(heads(out), DType::f32));
}

// One line of the command's own, whatever the number of ranks; mpirun adds its own words.
TEST_F(AttendOnRanks, what_is_wrong_is_said_once_and_leaves_no_file) {
  save_random("q.npy", {1, 2, 8, 4}, 1);
  save_random("short.npy", {1, 2, 8, 3}, 2);
  const auto expect_said_once = [&](const Arguments& arguments, int code, const std::string& text) {
    const Finished finished = run_on(3, arguments);
    EXPECT_EQ(finished.code, code) << finished.err;
    const std::size_t at = finished.err.find("headway attend: " + text);
    EXPECT_NE(at, std::string::npos) << finished.err;
    EXPECT_EQ(finished.err.find("headway attend: ", at + 1), std::string::npos) << finished.err;
    EXPECT_EQ(finished.out, "");
    EXPECT_EQ(files(), (std::set<std::string>{"q.npy", "short.npy"}));
  };
  expect_said_once({"attend", "q.npy", "short.npy", "q.npy", "-o", "out.npy"}, 2, "rank 0: key has head_dim 3");
  expect_said_once({"attend", "q.npy", "q.npy", "q.npy", "-o", "short.npy"}, 1,
                   "short.npy exists; --force replaces it");
  expect_said_once({"attend", "q.npy", "gone.npy", "q.npy", "-o", "out.npy"}, 1, "gone.npy: cannot open");
  expect_said_once({"attend", "q.npy", "q.npy", "q.npy", "-o", "out.npz"}, 2,
                   "on several ranks expected .npy files, which each rank reads by its rows, found out.npz");
  expect_said_once({"attend", "q.npy", "q.npy", "q.npy", "-o", "out.npy", "--weights", "w.npy"}, 1,
                   "rank 0: weights are not stored over a split sequence");
}

// MPI_Init waits for every rank, and has no time limit of its own.
TEST_F(AttendOnRanks, a_rank_that_ends_before_it_joins_ends_the_job) {
  save_random("q.npy", {1, 2, 8, 4}, 1);
  const Finished finished =
      run_on(3, {"attend", "q.npy", "q.npy", "q.npy", "-o", "out.npy", "--timeout", "1.5"},
             {"sh", "-c", R"([ "$OMPI_COMM_WORLD_RANK" = 1 ] && exit 0; exec "$0" "$@")", HEADWAY_COMMAND});
  EXPECT_EQ(finished.code, 1) << finished.err;
  EXPECT_NE(finished.err.find("headway attend: MPI_Init has not returned for 1.5 s"), std::string::npos)
      << finished.err;
  EXPECT_EQ(files(), std::set<std::string>{"q.npy"});
}

TEST_F(AttendOnRanks, a_rank_that_is_stopped_ends_the_job) {
  save_random("q.npy", {1, 2, 8, 4}, 1);
  const Finished finished =
      run_on(2, {"attend", "q.npy", "q.npy", "q.npy", "-o", "out.npy", "--timeout", "1.5"},
             {"sh", "-c", R"([ "$OMPI_COMM_WORLD_RANK" = 1 ] && kill -STOP $$; exec "$0" "$@")", HEADWAY_COMMAND});
  EXPECT_EQ(finished.code, 1) << finished.err;
  EXPECT_EQ(files(), std::set<std::string>{"q.npy"});
}

TEST_F(AttendOnRanks, an_interrupted_job_says_so_once_and_leaves_no_file) {
  save_random("q.npy", {1, 8, 8192, 64}, 1);  // minutes of work for the reference engine
  const Finished finished = run_child([] {
    const std::string job = std::string(HEADWAY_MPIEXEC) + " --oversubscribe --bind-to none -n 2 " + HEADWAY_COMMAND +
                            " attend q.npy q.npy q.npy -o out.npy --lse lse.npy --engine reference & "
                            "sleep 1.5; kill -INT $!; wait $!";
    ::execl("/bin/sh", "sh", "-c", job.c_str(), nullptr);
    ::_exit(127);
  });
  EXPECT_EQ(finished.code, 1) << finished.err;
  const std::size_t at = finished.err.find("headway attend: interrupted");
  EXPECT_NE(at, std::string::npos) << finished.err;
  EXPECT_EQ(finished.err.find("headway attend: ", at + 1), std::string::npos) << finished.err;
  EXPECT_EQ(finished.out, "");
  EXPECT_EQ(files(), std::set<std::string>{"q.npy"});
}

TEST_F(AttendOnRanks, a_full_disk_is_said_once_and_leaves_no_file) {
  save_random("q.npy", {1, 1, 98304, 64}, 1);  // 24 MiB; Open MPI's own files are smaller than 16
  save_random("k.npy", {1, 1, 16, 64}, 2);
  const Finished finished = run_on(2, {"attend", "q.npy", "k.npy", "k.npy", "-o", "out.npy"},
                                   {"sh", "-c", R"(trap '' XFSZ; ulimit -f 32768; exec "$0" "$@")", HEADWAY_COMMAND});
  EXPECT_EQ(finished.code, 1) << finished.err;
  const std::size_t at = finished.err.find("headway attend: out.npy: ");
  ASSERT_NE(at, std::string::npos) << finished.err;
  EXPECT_EQ(finished.err.find("headway attend: ", at + 1), std::string::npos) << finished.err;
  EXPECT_EQ(files(), (std::set<std::string>{"k.npy", "q.npy"}));
}

}  // namespace
}  // namespace headway::test
