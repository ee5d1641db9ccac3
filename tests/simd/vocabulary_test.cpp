// Each operation of each vocabulary that this machine can run, against plain C++.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#include "engines/cpu/kernels.h"
#include "simd/vocabulary_checks.h"

namespace headway::cpu {
namespace {

std::int64_t comparisons = 0;
std::int64_t failures = 0;

bool is_available(const std::string& name) {
  for (const Kernels* kernels : available_kernels()) {
    if (name == kernels->name) return true;
  }
  return false;
}

// Two pages, of which the second may not be touched.
class FencedPage {
 public:
  FencedPage() : size_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))) {
    memory_ = static_cast<char*>(mmap(nullptr, 2 * size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(memory_ + size_, size_, PROT_NONE);
  }
  ~FencedPage() { munmap(memory_, 2 * size_); }
  FencedPage(const FencedPage&) = delete;
  FencedPage& operator=(const FencedPage&) = delete;
  char* end() const { return memory_ + size_; }

 private:
  std::size_t size_;
  char* memory_;
};

void run(const char* name, void (*check)(const CheckReport&)) {
  if (!is_available(name)) GTEST_SKIP() << "this CPU has no " << name;
  const FencedPage page;
  comparisons = failures = 0;
  check(CheckReport{page.end()});
  EXPECT_GT(comparisons, 100);
  EXPECT_EQ(failures, 0);
}

}  // namespace

void CheckReport::compared(const char* operation, int lane, bool equal, double found, double expected) const {
  ++comparisons;
  if (equal) return;
  if (++failures <= 20) ADD_FAILURE() << operation << ", lane " << lane << ": " << found << ", expected " << expected;
}

TEST(Vocabulary, scalar_computes_what_plain_cpp_does) { run("scalar", check_scalar); }
#ifdef __x86_64__
TEST(Vocabulary, avx2_computes_what_plain_cpp_does) { run("avx2", check_avx2); }
TEST(Vocabulary, avx512_computes_what_plain_cpp_does) { run("avx512", check_avx512); }
TEST(Vocabulary, avx512_bf16_computes_what_plain_cpp_does) { run("avx512_bf16", check_avx512_bf16); }
TEST(Vocabulary, amx_computes_what_plain_cpp_does) { run("amx", check_amx); }
TEST(Vocabulary, emulated_amx_computes_what_plain_cpp_does) { run("amx_emulated", check_amx_emulated); }
#endif
#ifdef __aarch64__
TEST(Vocabulary, neon_computes_what_plain_cpp_does) { run("neon", check_neon); }
#endif

}  // namespace headway::cpu
