// cuBLASLt, found when it is first needed: the library is several hundred megabytes, and only layers on a GPU use it.
// Neither its headers nor the library itself are needed to build Headway, so what is used of its interface is declared
// here (stable since CUDA 11).
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace headway::cuda::lt {

using Handle = struct HandleStruct*;
using MatmulDescription = struct MatmulDescriptionStruct*;
using Layout = struct LayoutStruct*;
using Preference = struct PreferenceStruct*;
using Status = int;  // 0: success

struct Algorithm {
  std::uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  std::size_t workspace_bytes;
  Status status;
  float waves;
  int reserved[4];
};

enum class Compute : int { f32 = 68, f64 = 70 };  // CUBLAS_COMPUTE_32F never rounds to TF32
enum class MatmulAttribute : int { transpose_a = 3, transpose_b = 4, epilogue = 7, bias_pointer = 8 };
enum class Epilogue : std::uint32_t { none = 1, bias = 4 };
enum class PreferenceAttribute : int {
  most_workspace = 1,
  reduction_schemes = 3,
  alignment_a = 5,
  alignment_b = 6,
  alignment_c = 7,
  alignment_d = 8
};
// Parts of a split sum are kept in the type of the sums and added by a kernel of its own: one order, the same bits.
constexpr std::uint32_t reduce_in_compute_type = 2;

// The library's functions, under its own names.
struct Library {
  Status (*cublasLtCreate)(Handle*);
  Status (*cublasLtMatmulDescCreate)(MatmulDescription*, Compute, cudaDataType_t scale);
  Status (*cublasLtMatmulDescDestroy)(MatmulDescription);
  Status (*cublasLtMatmulDescSetAttribute)(MatmulDescription, MatmulAttribute, const void*, std::size_t);
  Status (*cublasLtMatrixLayoutCreate)(Layout*, cudaDataType_t, std::uint64_t rows, std::uint64_t columns,
                                       std::int64_t leading);
  Status (*cublasLtMatrixLayoutDestroy)(Layout);
  Status (*cublasLtMatmulPreferenceCreate)(Preference*);
  Status (*cublasLtMatmulPreferenceDestroy)(Preference);
  Status (*cublasLtMatmulPreferenceSetAttribute)(Preference, PreferenceAttribute, const void*, std::size_t);
  Status (*cublasLtMatmulAlgoGetHeuristic)(Handle, MatmulDescription, Layout a, Layout b, Layout c, Layout d,
                                           Preference, int wanted, Heuristic*, int* found);
  Status (*cublasLtMatmul)(Handle, MatmulDescription, const void* alpha, const void* a, Layout, const void* b, Layout,
                           const void* beta, const void* c, Layout, void* d, Layout, const Algorithm*, void* workspace,
                           std::size_t workspace_bytes, cudaStream_t);
  const char* (*cublasLtGetStatusString)(Status);
};

// Opens the library of this name, or the usual ones for an empty name. Unsupported, with the loader's own words, where
// there is none; `operation` begins the text.
Library load(std::string_view operation, const char* name = "");

// Loaded once.
const Library& library(std::string_view operation);
// Of the current device, made once.
Handle handle(int device, std::string_view operation);

// DeviceError: "MultiHeadAttention::infer: multiplying matrices: cuBLASLt says ...".
void check(Status status, std::string_view operation, std::string_view what);

}  // namespace headway::cuda::lt
