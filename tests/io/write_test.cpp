// What every write promises: all or nothing, no surprise to a file that is there, and the user's permissions.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <atomic>
#include <cerrno>
#include <exception>
#include <system_error>
#include <thread>

#include "files.h"

namespace headway {
namespace {

const Tensor& small() {
  static const Tensor tensor = Tensor::of<float>({2}, {1, 2});
  return tensor;
}

// Saves a large tensor over `path` in a process that may not write files beyond 100 kB. `on_excess` decides whether the
// write then fails or the process dies. Returns how it ended.
int save_in_limited_process(const std::filesystem::path& path, const Tensor& large, void (*on_excess)(int)) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, on_excess);
    const rlimit files{100'000, 100'000};
    const rlimit no_core{0, 0};
    ::setrlimit(RLIMIT_FSIZE, &files);
    ::setrlimit(RLIMIT_CORE, &no_core);
    try {
      save_npy(path, large, {.overwrite = true});
    } catch (const FileError& error) {
      ::_exit(std::strstr(error.what(), "File too large") != nullptr ? 1 : 2);
    }
    ::_exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return status;
}

TEST(Write, an_existing_file_is_kept_unless_overwrite_is_set) {
  const TestFolder folder;
  const auto path = put(folder / "x.npy", "precious");
  expect_file_error([&] { save_npy(path, small()); }, {"save_npy: " + path.string(), "exists", "overwrite"});
  EXPECT_EQ(content_of(path), "precious");
  save_npy(path, small(), {.overwrite = true});
  EXPECT_TRUE(same(load_npy(path), small()));
  EXPECT_EQ(folder.files(), 1u);
}

TEST(Write, the_errno_of_a_failure_is_nested_in_its_error) {
  const TestFolder folder;
  save_npy(folder / "x.npy", small());
  const auto number = [](const auto& call) {
    try {
      call();
    } catch (const FileError& error) {
      try {
        std::rethrow_if_nested(error);
      } catch (const std::system_error& nested) {
        return nested.code().value();
      }
    }
    return 0;
  };
  EXPECT_EQ(number([&] { save_npy(folder / "x.npy", small()); }), EEXIST);
  EXPECT_EQ(number([&] { save_npy(folder / "no/x.npy", small()); }), ENOENT);
  EXPECT_EQ(number([&] { load_npy(folder / "no.npy"); }), ENOENT);
  EXPECT_EQ(number([&] { load_npy(folder / "."); }), EISDIR);
  EXPECT_EQ(number([&] { load_npz(folder / "x.npy"); }), 0);  // the system did all that it was asked for
}

TEST(Write, a_name_that_says_another_format_is_refused) {
  const TestFolder folder;
  const auto text_of = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "no error";
  };
  const std::string expected = ": expected a file name that ends in ";
  const auto name = [&](const char* file) { return (folder / file).string(); };
  EXPECT_EQ(text_of([&] { save_npy(name("x.npz"), small()); }), "save_npy: " + name("x.npz") + expected + ".npy");
  EXPECT_EQ(text_of([&] {
              begin_npy(name("x.pt"), {DType::f32, {2}});
            }),
            "begin_npy: " + name("x.pt") + expected + ".npy");
  EXPECT_EQ(text_of([&] { save_npz(name("x.npy"), {}); }), "save_npz: " + name("x.npy") + expected + ".npz");
  EXPECT_EQ(text_of([&] { save_safetensors(name("x.npz"), {}); }),
            "save_safetensors: " + name("x.npz") + expected + ".safetensors");
  EXPECT_EQ(folder.files(), 0u);
  for (const char* other : {"x", "x.v2", "x.npz.safetensors"}) {
    save_safetensors(name(other), {});
  }
  EXPECT_EQ(folder.files(), 3u);
}

TEST(Write, a_failed_write_keeps_the_old_file_and_leaves_nothing_behind) {
  const TestFolder folder;
  const auto path = folder / "x.npy";
  save_npy(path, small());
  const int status = save_in_limited_process(path, Tensor({1'000'000}), SIG_IGN);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 1);
  EXPECT_TRUE(same(load_npy(path), small()));
  EXPECT_EQ(folder.files(), 1u);
}

TEST(Write, a_process_that_dies_while_writing_keeps_the_old_file) {
  const TestFolder folder;
  const auto path = folder / "x.npy";
  save_npy(path, small());
  const int status = save_in_limited_process(path, Tensor({1'000'000}), SIG_DFL);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_TRUE(same(load_npy(path), small()));
  EXPECT_EQ(folder.files(), 1u);
}

TEST(Write, of_many_writers_without_overwrite_one_wins) {
  const TestFolder folder;
  const auto path = folder / "x.npy";
  std::atomic<int> saved = 0;
  std::vector<std::thread> writers;
  for (int i = 0; i < 8; ++i) {
    writers.emplace_back([&] {
      try {
        save_npy(path, small());
        ++saved;
      } catch (const FileError&) {
      }
    });
  }
  for (std::thread& writer : writers) {
    writer.join();
  }
  EXPECT_EQ(saved, 1);
  EXPECT_EQ(folder.files(), 1u);
  EXPECT_TRUE(same(load_npy(path), small()));
}

TEST(Write, the_umask_decides_who_may_read) {
  const TestFolder folder;
  const mode_t before = ::umask(027);
  save_npy(folder / "x.npy", small());
  ::umask(before);
  struct stat status {};
  ASSERT_EQ(::stat((folder / "x.npy").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0640u);
}

TEST(Write, a_symbolic_link_is_written_through) {
  const TestFolder folder;
  put(folder / "real.npy", "old");
  std::filesystem::create_symlink("real.npy", folder / "link.npy");
  expect_file_error([&] { save_npy(folder / "link.npy", small()); }, {"exists"});
  save_npy(folder / "link.npy", small(), {.overwrite = true});
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link.npy"));
  EXPECT_TRUE(same(load_npy(folder / "real.npy"), small()));
}

TEST(Write, only_a_regular_file_is_replaced) {
  const TestFolder folder;
  const auto directory = folder / "folder";
  std::filesystem::create_directory(directory);
  expect_file_error([&] { save_npy(directory, small(), {.overwrite = true}); }, {"Is a directory"});
  const auto fifo = folder / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  expect_file_error([&] { save_npy(fifo, small(), {.overwrite = true}); }, {"expected a regular file"});
}

TEST(Write, a_missing_folder_is_an_error_in_the_systems_words) {
  const TestFolder folder;
  expect_file_error([&] { save_npy(folder / "none/x.npy", small()); }, {"No such file or directory"});
  expect_file_error([&] { save_npy("", small()); }, {"save_npy"});
}

TEST(Write, a_name_as_long_as_a_name_can_be_is_written) {
  const TestFolder folder;
  const auto path = folder / (std::string(251, 'n') + ".npy");
  save_npy(path, small());
  EXPECT_TRUE(same(load_npy(path), small()));
}

}  // namespace
}  // namespace headway
