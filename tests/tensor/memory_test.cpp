// Memory for tensors: aligned, reused, never shared.
#include "core/memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "headway/tensor.h"

namespace headway {
namespace {

constexpr std::size_t huge_page = std::size_t{2} << 20;
constexpr std::size_t sizes[] = {
    0, 1, 64, 1000, kept_block - 1, kept_block, kept_block + 1, huge_page - 1, huge_page, huge_page + 1, 3 * huge_page};

TEST(Memory, every_block_is_aligned_and_can_be_written_to_its_end) {
  for (const std::size_t bytes : sizes) {
    auto memory = owned_memory(bytes);
    ASSERT_NE(memory, nullptr) << bytes;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.get()) % 64, 0u) << bytes;
    auto* first = static_cast<unsigned char*>(memory.get());
    std::fill(first, first + bytes, static_cast<unsigned char>(1));
  }
}

TEST(Memory, a_block_that_is_given_back_serves_the_next_of_its_size) {
  if (exact_blocks) {
    GTEST_SKIP() << "with the address sanitizer no block is kept";
  }
  for (const std::size_t bytes : {kept_block, 5 * huge_page}) {
    void* first = take_memory(bytes);
    give_back_memory(first, bytes);
    const auto other = owned_memory(bytes + huge_page);
    const auto same = owned_memory(bytes);
    EXPECT_NE(other.get(), first);
    EXPECT_EQ(same.get(), first);
  }
}

TEST(Memory, a_tensor_of_zeros_is_zero_also_in_a_used_block) {
  const Dims dims{1 << 20};
  {
    Tensor used = Tensor::uninitialized(dims, DType::f32);
    std::fill(used.as<float>(), used.as<float>() + used.elements(), 1.0f);
  }
  const Tensor zeros(dims, DType::f32);
  EXPECT_TRUE(std::all_of(zeros.as<float>(), zeros.as<float>() + zeros.elements(), [](float x) { return x == 0; }));
}

TEST(Memory, what_no_machine_has_is_refused) {
  EXPECT_EQ(take_memory(SIZE_MAX), nullptr);
  EXPECT_EQ(take_memory(std::size_t{1} << 62), nullptr);
  give_back_memory(nullptr, huge_page);
  give_back_memory(nullptr, 1);
}

TEST(Memory, no_two_threads_get_the_same_block) {
  constexpr std::size_t bytes = huge_page;
  std::atomic<int> mixed{0};
  std::vector<std::thread> threads;
  for (int id = 1; id <= 4; ++id) {
    threads.emplace_back([&mixed, id] {
      for (int round = 0; round < 50; ++round) {
        const auto memory = owned_memory(bytes);
        auto* numbers = static_cast<volatile int*>(memory.get());
        numbers[0] = id;
        numbers[bytes / sizeof(int) - 1] = id;
        std::this_thread::yield();
        mixed += numbers[0] != id || numbers[bytes / sizeof(int) - 1] != id;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(mixed, 0);
}

}  // namespace
}  // namespace headway
