// Thousands of damaged copies of good files: each loads or gives a FileError, and none takes much memory.
#include <gtest/gtest.h>

#include <functional>

#include "files.h"

#ifdef __SANITIZE_ADDRESS__
extern "C" const char* __asan_default_options() { return "max_allocation_size_mb=64"; }
#endif

namespace headway {
namespace {

using Random = std::mt19937;

std::size_t below(Random& random, std::size_t bound) { return random() % bound; }

// Numbers at which arithmetic goes wrong.
std::uint64_t odd_number(Random& random) {
  constexpr std::uint64_t numbers[] = {0,          1,          0x7f,        0xff,       0xffff,
                                       0x7fffffff, 0xffffffff, 0x100000000, 1ull << 62, ~0ull};
  return numbers[below(random, std::size(numbers))];
}

std::string damaged(std::string content, Random& random) {
  const std::size_t at = below(random, content.size());
  switch (below(random, 7)) {
    case 0: content[at] = static_cast<char>(content[at] ^ (1 << below(random, 8))); break;
    case 1: content[at] = static_cast<char>(random()); break;
    case 2: content[at] = "0123456789-,:[](){}\"' "[below(random, 22)]; break;  // of the headers that are text
    case 3: content.resize(at + 1); break;
    case 4: content.insert(at, content.substr(below(random, content.size()), below(random, 64))); break;
    case 5: content.erase(at, below(random, 16)); break;
    default: {
      const std::string number = little_endian(odd_number(random)).substr(0, std::size_t{1} << below(random, 4));
      content.replace(at, number.size(), number);
    }
  }
  return content.empty() ? "x" : content;
}

void expect_only_file_errors(const std::filesystem::path& path, const std::function<void()>& load) {
  constexpr int copies = 3000;
  const std::string good = content_of(path);
  ASSERT_NO_THROW(load());
  Random random(20240607);
  const SmallMemory small;
  int refused = 0;
  for (int i = 0; i < copies; ++i) {
    std::string content = damaged(good, random);
    for (std::size_t more = below(random, 3); more > 0; --more) {
      content = damaged(content, random);
    }
    put(path, content);
    try {
      load();
    } catch (const FileError&) {
      ++refused;
    } catch (const std::exception& error) {
      FAIL() << "copy " << i << ": " << error.what();
    }
  }
  EXPECT_GT(refused, copies / 4);
}

TEST(Mutation, damaged_npy_files_give_file_errors_only) {
  const TestFolder folder;
  save_npy(folder / "x.npy", random_bits({2, 3}, DType::f32));
  expect_only_file_errors(folder / "x.npy", [&] { load_npy(folder / "x.npy"); });
  save_npy(folder / "y.npy", random_bits({2, 3}, DType::f32));
  std::string fortran = content_of(folder / "y.npy");
  fortran.replace(fortran.find("False"), 5, "True ");
  put(folder / "y.npy", fortran);
  expect_only_file_errors(folder / "y.npy", [&] { load_npy(folder / "y.npy"); });
}

TEST(Mutation, damaged_npz_files_give_file_errors_only) {
  const TestFolder folder;
  const Tensor noise = random_bits({2, 3}, DType::f32);
  const Tensor zeros({50});
  for (const bool compress : {false, true}) {
    save_npz(folder / "x.npz", {{"noise", noise}, {"zeros", zeros}}, {.overwrite = true, .compress = compress});
    expect_only_file_errors(folder / "x.npz", [&] { load_npz(folder / "x.npz"); });
  }
}

TEST(Mutation, damaged_safetensors_files_give_file_errors_only) {
  const TestFolder folder;
  const Tensor noise = random_bits({2, 3}, DType::bf16);
  const Tensor scalar = random_bits({}, DType::i64);
  save_safetensors(folder / "x", {{"noise", noise}, {"scalar", scalar}}, {{"format", "pt"}});
  expect_only_file_errors(folder / "x", [&] { load_safetensors(folder / "x"); });
}

}  // namespace
}  // namespace headway
