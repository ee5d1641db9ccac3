// Decoding and chunks of prompts over pages on a GPU, beside the same keys in one tensor and the bandwidth of a copy.
// Prints one line a case: microseconds of the device (the median of several, in random order of pages), of the host for
// the call alone, and the share of the copy's bandwidth that reading keys and values once comes to.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "headway/headway.h"

namespace {

using namespace headway;

constexpr Device gpu{DeviceType::cuda, 0};

void check(cudaError_t result) {
  if (result != cudaSuccess) {
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(result));
  }
}

// Normal numbers, the same few megabytes again and again.
Tensor random_on_device(const Dims& sizes, DType dtype) {
  constexpr std::int64_t piece = std::int64_t{1} << 20;
  Tensor numbers({piece}, DType::f32);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < piece; ++i) {
    numbers.as<float>()[i] = normal(random) * (is_8bit(dtype) ? 30.0f : 1.0f);
  }
  const Tensor source = convert(numbers, dtype);
  Tensor result = Tensor::uninitialized(sizes, dtype, gpu);
  const std::size_t bytes = static_cast<std::size_t>(result.elements()) * size_of(dtype);
  const std::size_t piece_bytes = static_cast<std::size_t>(piece) * size_of(dtype);
  for (std::size_t at = 0; at < bytes; at += piece_bytes) {
    check(cudaMemcpy(static_cast<char*>(result.data()) + at, source.data(), std::min(piece_bytes, bytes - at),
                     cudaMemcpyHostToDevice));
  }
  return result;
}

struct Time {
  double device, host;  // microseconds
};

Time time_of(const std::function<void()>& call) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<double> device, host;
  for (int n = 0; n < 25; ++n) {
    check(cudaDeviceSynchronize());
    check(cudaEventRecord(begin));
    const auto start = std::chrono::steady_clock::now();
    call();
    host.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end));
    device.push_back(milliseconds * 1000.0);
  }
  const auto median = [](std::vector<double>& times) {
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  };
  check(cudaEventDestroy(begin));
  check(cudaEventDestroy(end));
  return {median(device), median(host)};
}

double copy_bandwidth() {  // bytes read and written a microsecond
  constexpr std::size_t bytes = std::size_t{1} << 30;
  const Tensor from = Tensor::uninitialized({bytes}, DType::i8, gpu);
  Tensor to = Tensor::uninitialized({bytes}, DType::i8, gpu);
  const Time time = time_of([&] { check(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice)); });
  return 2.0 * bytes / time.device;
}

struct Case {
  std::int64_t batch, keys, heads, kv_heads, dim, queries;
};

void print(const char* name, const Case& shape, const Time& time, double bytes, double bandwidth) {
  std::printf("%-34s b%-3lld q%-5lld n%-6lld %lld/%lld hd%lld  %9.1f us  %5.1f %% of copy  host %6.1f us\n", name,
              static_cast<long long>(shape.batch), static_cast<long long>(shape.queries),
              static_cast<long long>(shape.keys), static_cast<long long>(shape.heads),
              static_cast<long long>(shape.kv_heads), static_cast<long long>(shape.dim), time.device,
              100.0 * bytes / time.device / bandwidth, time.host);
  std::fflush(stdout);
}

double bytes_of(const Case& shape, DType dtype) {
  return 2.0 * static_cast<double>(shape.batch * shape.keys * shape.kv_heads * shape.dim *
                                   static_cast<std::int64_t>(size_of(dtype)));
}

void time_contiguous(const Case& shape, DType dtype, double bandwidth, bool invariant = false) {
  const Tensor query = random_on_device({shape.batch, shape.heads, shape.queries, shape.dim}, dtype);
  const Tensor key = random_on_device({shape.batch, shape.keys, shape.kv_heads, shape.dim}, dtype);
  const Tensor value = random_on_device({shape.batch, shape.keys, shape.kv_heads, shape.dim}, dtype);
  Tensor out = Tensor::uninitialized(query.sizes(), dtype, gpu);
  const AttentionOptions options{.causal = Causal::bottom_right, .batch_invariant = invariant};
  const Time time =
      time_of([&] { attention(query, key.view().transpose(1, 2), value.view().transpose(1, 2), out, options); });
  print((std::string(name(dtype)) + " one tensor" + (invariant ? ", invariant" : "")).c_str(), shape, time,
        bytes_of(shape, dtype), bandwidth);
}

void time_paged(const Case& shape, DType dtype, DType stored, std::int64_t page_size, double bandwidth,
                bool host_table = false, bool invariant = false) {
  const std::int64_t each = (shape.keys + page_size - 1) / page_size, pages = each * shape.batch;
  const Tensor query = random_on_device({shape.batch, shape.heads, shape.queries, shape.dim}, dtype);
  const Tensor key = random_on_device({pages, page_size, shape.kv_heads, shape.dim}, stored);
  const Tensor value = random_on_device({pages, page_size, shape.kv_heads, shape.dim}, stored);
  Tensor out = Tensor::uninitialized(query.sizes(), dtype, gpu);
  Tensor table({shape.batch, each}, DType::i32), lengths({shape.batch}, DType::i32);
  std::iota(table.as<std::int32_t>(), table.as<std::int32_t>() + pages, 0);
  std::shuffle(table.as<std::int32_t>(), table.as<std::int32_t>() + pages, std::mt19937(3));
  std::fill(lengths.as<std::int32_t>(), lengths.as<std::int32_t>() + shape.batch,
            static_cast<std::int32_t>(shape.keys));
  Tensor far_table = Tensor::uninitialized(table.sizes(), DType::i32, gpu);
  Tensor far_lengths = Tensor::uninitialized(lengths.sizes(), DType::i32, gpu);
  copy(table, far_table);
  copy(lengths, far_lengths);
  PagedKeys keys{.key_pages = key,
                 .value_pages = value,
                 .block_table = host_table ? table : far_table,
                 .lengths = host_table ? lengths : far_lengths};
  std::optional<Tensor> scales;
  if (is_8bit(stored)) {
    Tensor ones({pages, page_size, shape.kv_heads});
    std::fill(ones.as<float>(), ones.as<float>() + ones.elements(), 0.03f);
    scales = Tensor::uninitialized(ones.sizes(), DType::f32, gpu);
    copy(ones, *scales);
    keys.key_scales = *scales;
    keys.value_scales = *scales;
  }
  const AttentionOptions options{.causal = Causal::bottom_right, .batch_invariant = invariant};
  const Time time = time_of([&] { attention_paged(query, keys, out, options); });
  const std::string text = std::string(name(dtype)) + (is_8bit(stored) ? std::string(" ") + name(stored) : "") +
                           " pages of " + std::to_string(page_size) + (host_table ? ", host table" : "") +
                           (invariant ? ", invariant" : "");
  print(text.c_str(), shape, time, bytes_of(shape, stored), bandwidth);
}

void run() {
  const double bandwidth = copy_bandwidth();
  std::printf("copy: %.0f GB/s\n", bandwidth / 1000.0);
  const Case decode{64, 8192, 32, 8, 128, 1};
  time_contiguous(decode, DType::bf16, bandwidth);
  for (const std::int64_t page_size : {1, 8, 16, 64, 256}) {
    time_paged(decode, DType::bf16, DType::bf16, page_size, bandwidth);
  }
  time_contiguous(decode, DType::bf16, bandwidth, true);
  time_paged(decode, DType::bf16, DType::bf16, 16, bandwidth, false, true);
  time_paged(decode, DType::bf16, DType::bf16, 16, bandwidth, true);
  for (const DType stored : {DType::i8, DType::f8e4m3}) {
    for (const std::int64_t page_size : {16, 64}) {
      time_paged(decode, DType::bf16, stored, page_size, bandwidth);
    }
  }
  for (const Case& shape :
       {Case{1, 32768, 32, 8, 128, 1}, Case{8, 2048, 32, 8, 128, 1}, Case{64, 8192, 32, 8, 64, 1}}) {
    time_contiguous(shape, DType::bf16, bandwidth);
    time_paged(shape, DType::bf16, DType::bf16, 16, bandwidth);
    time_paged(shape, DType::bf16, DType::i8, 16, bandwidth);
  }
  for (const Case& shape : {Case{1, 8192, 32, 8, 128, 512}, Case{4, 4096, 32, 8, 128, 2048}}) {
    time_contiguous(shape, DType::bf16, bandwidth);
    for (const std::int64_t page_size : {1, 16, 64, 256}) {
      time_paged(shape, DType::bf16, DType::bf16, page_size, bandwidth);
    }
  }
}

}  // namespace

int main() try {
  run();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
