// A disk that is full or breaks at any write, a folder that may not be written: the old file stays, nothing is left
// behind, and the next save works.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <iterator>
#include <vector>

#include "refusals.h"
#include "support.h"

namespace headway::test {
namespace {

std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

struct Writer {
  const char* name;
  std::function<void(const std::filesystem::path&)> write;  // over what is there
};

std::vector<Writer> writers() {
  static const Tensor tensor = numbers({300, 40}), q = numbers({1, 2, 5, 4});
  std::vector<Writer> all = {{"save_npy", [](const auto& path) { save_npy(path, tensor, {.overwrite = true}); }}};
  all.push_back({"save_npz", [](const auto& path) { save_npz(path, {{"x", tensor}}, {.overwrite = true}); }});
  all.push_back({"save_npz, compressed", [](const auto& path) {
                   save_npz(path, {{"x", tensor}}, {.overwrite = true, .compress = true});
                 }});
  all.push_back({"save_safetensors", [](const auto& path) {
                   save_safetensors(path, {{"x", tensor}}, {}, {.overwrite = true});
                 }});
  all.push_back({"MultiHeadAttention::save",
                 [](const auto& path) { MultiHeadAttention({.model_dim = 8, .heads = 2}).save(path, true); }});
  all.push_back({"write_trace", [](const auto& path) { write_trace(path, trace(q, q, q), true); }});
  all.push_back({"write_view", [](const auto& path) { write_view(path, q, q, {}, {.overwrite = true}); }});
  return all;
}

TEST(Files, that_the_disk_refuses_at_any_write_leave_the_old_one_and_nothing_else) {
  for (const Writer& writer : writers()) {
    const Folder folder;
    const auto path = folder / "file";
    std::ofstream(path) << "precious";
    long nth = 0;
    for (bool happened = true; happened; ++nth) {
      const Refusal refusal(Refused::writes, nth, HowOften::once);
      try {
        writer.write(path);
        happened = refusal.happened();
      } catch (const FileError& error) {
        EXPECT_NE(std::string(error.what()).find("cannot write"), std::string::npos) << error.what();
        EXPECT_EQ(content_of(path), "precious") << writer.name << ", write " << nth;
        EXPECT_EQ(folder.files(), 1) << writer.name << ", write " << nth;
      }
      // The last one tells the system to keep the new name: the file is whole without it.
      if (happened && content_of(path) != "precious") {
        std::ofstream(path) << "precious";
      }
    }
    EXPECT_GT(nth, 2) << writer.name;
    EXPECT_NE(content_of(path), "precious") << writer.name;
    EXPECT_EQ(folder.files(), 1) << writer.name;
  }
}

// As an ordinary user: the superuser may write anywhere.
TEST(Files, in_a_folder_that_may_not_be_written_are_an_error_that_says_so) {
  const Folder folder;
  std::filesystem::permissions(folder.path(), std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec |
                                                  std::filesystem::perms::others_read |
                                                  std::filesystem::perms::others_exec);
  for (const Writer& writer : writers()) {
    EXPECT_EQ(in_child([&] {
                if (geteuid() == 0 && setuid(65534) != 0) return 1;
                try {
                  writer.write(folder / "file");
                } catch (const FileError& error) {
                  return std::string(error.what()).find("Permission denied") != std::string::npos ? 0 : 2;
                }
                return 3;
              }),
              0)
        << writer.name;
  }
  EXPECT_EQ(folder.files(), 0);
}

// Ended by a signal in the middle: nobody is left to clean up.
TEST(Files, of_a_process_that_is_killed_while_writing_leave_the_old_one_and_nothing_else) {
  for (const Writer& writer : writers()) {
    const Folder folder;
    const auto path = folder / "file";
    std::ofstream(path) << "precious";
    int killed = 0;
    for (int status = -1; status == -1; ++killed) {
      EXPECT_EQ(content_of(path), "precious") << writer.name << ", write " << killed;
      EXPECT_EQ(folder.files(), 1) << writer.name << ", write " << killed;
      status = in_child([&] {
        const Refusal refusal(Refused::life, killed, HowOften::once);
        writer.write(path);
        return refusal.happened() ? 1 : 0;
      });
      EXPECT_NE(status, 1);
      if (status == -1 && content_of(path) != "precious") {  // killed after the new name was there
        std::ofstream(path) << "precious";
      }
    }
    EXPECT_GT(killed, 2) << writer.name;
  }
}

}  // namespace
}  // namespace headway::test
