// The functions that benchmarks/native.py calls. Rates are per second, over all the threads together.
#pragma once

#include <cstdint>

extern "C" {

// Floating-point operations in registers alone: the ceiling of any kernel. 0 where the machine lacks the instruction.
double headway_peak_f32(int threads, double seconds);
double headway_peak_f32_avx2(int threads, double seconds);
double headway_peak_bf16(int threads, double seconds);
// What the first of them reaches right now.
double headway_rate_f32(int threads, double seconds);

// Reads the memory once, each thread its part: the ceiling of what must read it.
void headway_read(const void* memory, std::int64_t bytes, int threads);

// y = x W: x [rows, inputs], W [inputs, outputs], contiguous. Each says with 0 that it is not built in.
int headway_product(const float* x, const float* weight, float* y, std::int64_t rows, std::int64_t inputs,
                    std::int64_t outputs);
int openblas_product(const float* x, const float* weight, float* y, std::int64_t rows, std::int64_t inputs,
                     std::int64_t outputs);
int onednn_product(const float* x, const float* weight, float* y, std::int64_t rows, std::int64_t inputs,
                   std::int64_t outputs);

// The layer, self-attention on x [batch, length, model_dim]; weights may be null.
void* headway_layer_make(std::int64_t model_dim, std::int64_t heads);
void headway_layer_free(void* layer);
void headway_layer_infer(void* layer, const float* x, std::int64_t batch, std::int64_t length, float* weights);

void headway_native_threads(int threads);
}
