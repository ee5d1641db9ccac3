// Every system call of a write refused in turn, writes in pieces, a process that is killed, a folder that may not be
// written to: the file is complete under its name, or what was there before is still there, and nothing else is left.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <functional>

#include "files.h"
#include "support/system_calls.h"

namespace headway::test {
namespace {

const Tensor& numbers() {
  static const Tensor tensor = random_bits({50, 3}, DType::f32);
  return tensor;
}

struct Format {
  const char* name;
  std::function<void(const std::filesystem::path&, bool overwrite)> save;
};

std::vector<Format> formats() {
  std::vector<Format> formats = {
      {"npy", [](const auto& path, bool overwrite) { save_npy(path, numbers(), {.overwrite = overwrite}); }}};
#ifdef HEADWAY_IO_NPZ
  formats.push_back({"npz", [](const auto& path, bool overwrite) {
                       save_npz(path, {{"a", numbers()}, {"b", numbers()}}, {.overwrite = overwrite, .compress = true});
                     }});
#endif
#ifdef HEADWAY_IO_SAFETENSORS
  formats.push_back({"safetensors", [](const auto& path, bool overwrite) {
                       save_safetensors(path, {{"a", numbers()}}, {}, {.overwrite = overwrite});
                     }});
#endif
  return formats;
}

// What the format's file holds when nothing goes wrong.
std::string expected_content(const Format& format) {
  const TestFolder folder;
  format.save(folder / "x", false);
  return content_of(folder / "x");
}

// Returns how many calls a write makes.
int expect_all_or_nothing(const Format& format, const std::string& complete, bool overwrite, int refused, int error) {
  static const std::string old = "what was there before";
  const TestFolder folder;
  if (overwrite) {
    put(folder / "x", old);
  }
  bool saved = true;
  int calls = 0;
  {
    const RefusedCall refusal(refused, error);
    try {
      format.save(folder / "x", overwrite);
    } catch (const FileError&) {
      saved = false;
    }
    calls = refusal.calls();
  }
  EXPECT_EQ(folder.files(), saved || overwrite ? 1u : 0u);
  EXPECT_EQ(content_of(folder / "x"), saved ? complete : overwrite ? old : "");
  return calls;
}

TEST(WriteFault, a_call_that_the_system_refuses_leaves_the_old_file_or_the_new_one_and_nothing_else) {
  for (const Format& format : formats()) {
    const std::string complete = expected_content(format);
    for (const bool overwrite : {false, true}) {
      for (const int error : {ENOSPC, EIO, EPERM}) {
        const int calls = expect_all_or_nothing(format, complete, overwrite, -1, error);
        EXPECT_GE(calls, 5);  // open, write, sync, close, give the name
        for (int refused = 0; refused < calls; ++refused) {
          SCOPED_TRACE(testing::Message() << format.name << ", overwrite " << overwrite << ", call " << refused
                                          << " refused: " << std::strerror(error));
          expect_all_or_nothing(format, complete, overwrite, refused, error);
        }
      }
    }
  }
}

TEST(WriteFault, the_error_says_what_the_system_said) {
  const TestFolder folder;
  const auto path = folder / "x.npy";
  const RefusedCall refusal(1, ENOSPC);
  expect_file_error([&] { save_npy(path, numbers()); }, {"save_npy: " + path.string(), "No space left on device"});
}

TEST(WriteFault, writes_in_pieces_make_the_whole_file) {
  for (const Format& format : formats()) {
    const std::string complete = expected_content(format);
    const TestFolder folder;
    const WatchedWrites few_bytes([] {}, 7);
    format.save(folder / "x", false);
    EXPECT_EQ(content_of(folder / "x"), complete) << format.name;
  }
}

TEST(WriteFault, a_killed_process_keeps_the_old_file_and_leaves_nothing_behind) {
  const TestFolder folder;
  const auto path = put(folder / "x.npy", "precious");
#ifdef O_TMPFILE
  const int unnamed = ::open(path.parent_path().c_str(), O_WRONLY | O_TMPFILE, 0600);
#else
  const int unnamed = -1;
#endif
  const pid_t child = ::fork();
  if (child == 0) {
    const WatchedWrites killed([] { ::raise(SIGKILL); });
    save_npy(path, numbers(), {.overwrite = true});
    ::_exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(content_of(path), "precious");
  if (unnamed < 0) {
    GTEST_SKIP() << "this file system has no files without a name: the temporary one stays";
  }
  ::close(unnamed);
  EXPECT_EQ(folder.files(), 1u);
}

TEST(WriteFault, a_folder_that_may_not_be_written_to_is_an_error_in_the_systems_words) {
  const TestFolder folder;
  const auto closed = folder / "closed";
  std::filesystem::create_directory(closed);
  put(closed / "x.npy", "precious");
  const auto all_may =
      std::filesystem::perms::owner_all | std::filesystem::perms::group_all | std::filesystem::perms::others_all;
  std::filesystem::permissions(folder / "", all_may);
  ASSERT_EQ(::chmod(closed.c_str(), 0555), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    constexpr uid_t nobody = 65534;
    if (::geteuid() == 0 && ::seteuid(nobody) != 0) {  // root may write everywhere
      ::_exit(3);
    }
    for (const bool overwrite : {false, true}) {
      try {
        save_npy(closed / (overwrite ? "x.npy" : "y.npy"), numbers(), {.overwrite = overwrite});
        ::_exit(1);
      } catch (const FileError& error) {
        if (std::strstr(error.what(), "Permission denied") == nullptr) {
          ::_exit(2);
        }
      }
    }
    ::_exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(content_of(closed / "x.npy"), "precious");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(closed), {}), 1);
  ASSERT_EQ(::chmod(closed.c_str(), 0755), 0);
}

}  // namespace
}  // namespace headway::test
