// The peak of this machine: loops over nothing but the instruction that bounds a kernel. Each thread runs a
// loop of independent chains, more than an instruction's latency needs, for a given time.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <thread>
#include <vector>

#include "native.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// The sum of what `rate` says on each thread.
double on_threads(int threads, const std::function<double(int)>& rate) {
  std::vector<double> rates(static_cast<std::size_t>(threads));
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) {
    others.emplace_back([&, t] { rates[static_cast<std::size_t>(t)] = rate(t); });
  }
  rates[0] = rate(0);
  for (std::thread& other : others) other.join();
  double sum = 0;
  for (const double one : rates) sum += one;
  return sum;
}

enum class Which { best, mean };

// Runs `chains`, which does `operations` of them, again and again, in many short stretches. The best of them says what
// the machine can do, the mean what it did: less where something else ran.
template <class Chains>
double rate_of(double seconds, double operations, Chains chains, Which which = Which::best) {
  double best = 0, count = 0;
  const auto begin = Clock::now();
  for (; seconds_since(begin) < seconds; ++count) {
    const auto stretch = Clock::now();
    for (int i = 0; i < 4; ++i) chains();
    best = std::max(best, 4 * operations / seconds_since(stretch));
  }
  return which == Which::best ? best : 4 * operations * count / seconds_since(begin);
}

constexpr int steps = 20'000;  // of each chain in one stretch: some 0.1 ms
constexpr int chain_count = 12;

#ifdef __x86_64__

__attribute__((target("avx512f"))) void chains_f32_avx512() {
  __m512 sums[chain_count];
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  __m512 a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(0.25f);
  asm volatile("" : "+v"(a), "+v"(b));
  for (int step = 0; step < steps; ++step) {
    for (auto& sum : sums) sum = _mm512_fmadd_ps(a, b, sum);
  }
  for (auto& sum : sums) asm volatile("" ::"v"(sum));
}

__attribute__((target("avx2,fma"))) void chains_f32_avx2() {
  __m256 sums[chain_count];
  for (auto& sum : sums) sum = _mm256_setzero_ps();
  __m256 a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(0.25f);
  asm volatile("" : "+x"(a), "+x"(b));
  for (int step = 0; step < steps; ++step) {
    for (auto& sum : sums) sum = _mm256_fmadd_ps(a, b, sum);
  }
  for (auto& sum : sums) asm volatile("" ::"x"(sum));
}

__attribute__((target("avx512f,avx512bf16"))) void chains_bf16() {
  __m512 sums[chain_count];
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  auto a = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f003f00));
  auto b = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3e803e80));
  asm volatile("" : "+v"(a), "+v"(b));
  for (int step = 0; step < steps; ++step) {
    for (auto& sum : sums) sum = _mm512_dpbf16_ps(sum, a, b);
  }
  for (auto& sum : sums) asm volatile("" ::"v"(sum));
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() { return __builtin_cpu_supports("avx512f") != 0; }
bool has_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

#else

// Elsewhere the compiler finds the widest FMA that the flags allow.
void chains_f32_any() {
  constexpr int lanes = 4;
  float sums[chain_count][lanes] = {};
  float a = 0.5f, b = 0.25f;
  asm volatile("" : "+r"(a), "+r"(b));
  for (int step = 0; step < steps; ++step) {
    for (auto& chain : sums) {
      for (float& sum : chain) sum = __builtin_fmaf(a, b, sum);
    }
  }
  asm volatile("" ::"r"(&sums) : "memory");
}

#endif

// Four streams, which the memory serves faster than one, in as wide loads as there are; nothing is done with them.
using Words = std::int64_t __attribute__((vector_size(64), aligned(16)));

#ifdef __x86_64__
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void read_all(const Words* words, std::int64_t count) {
  constexpr int streams = 4, lines = 4;
  Words sums[streams] = {};
  const std::int64_t part = count / streams;
  for (std::int64_t i = 0; i + lines <= part; i += lines) {
    for (int stream = 0; stream < streams; ++stream) {
      for (int line = 0; line < lines; ++line) sums[stream] ^= words[stream * part + i + line];
    }
  }
  asm volatile("" ::"r"(&sums) : "memory");
}

}  // namespace

namespace {

double f32_rate(int threads, double seconds, Which which) {
#ifdef __x86_64__
  const bool wide = has_avx512();
  const double operations = (wide ? 32.0 : 16.0) * steps * chain_count;
  void (*const chains)() = wide ? chains_f32_avx512 : chains_f32_avx2;
  if (!wide && !has_avx2()) {
    return 0;
  }
#else
  const double operations = 8.0 * steps * chain_count;
  void (*const chains)() = chains_f32_any;
#endif
  return on_threads(threads, [=](int) { return rate_of(seconds, operations, chains, which); });
}

}  // namespace

extern "C" double headway_peak_f32(int threads, double seconds) { return f32_rate(threads, seconds, Which::best); }
extern "C" double headway_rate_f32(int threads, double seconds) { return f32_rate(threads, seconds, Which::mean); }

extern "C" double headway_peak_f32_avx2(int threads, double seconds) {
#ifdef __x86_64__
  if (has_avx2()) {
    return on_threads(threads, [=](int) { return rate_of(seconds, 16.0 * steps * chain_count, chains_f32_avx2); });
  }
#endif
  static_cast<void>(threads), static_cast<void>(seconds);
  return 0;
}

extern "C" double headway_peak_bf16(int threads, double seconds) {
#ifdef __x86_64__
  if (has_bf16()) {
    return on_threads(threads, [=](int) { return rate_of(seconds, 64.0 * steps * chain_count, chains_bf16); });
  }
#endif
  static_cast<void>(threads), static_cast<void>(seconds);
  return 0;
}

extern "C" void headway_read(const void* memory, std::int64_t bytes, int threads) {
  const auto* words = static_cast<const Words*>(memory);
  const std::int64_t count = bytes / static_cast<std::int64_t>(sizeof(Words));
  on_threads(threads, [=](int t) {
    const std::int64_t begin = count * t / threads;
    read_all(words + begin, count * (t + 1) / threads - begin);
    return 0.0;
  });
}
