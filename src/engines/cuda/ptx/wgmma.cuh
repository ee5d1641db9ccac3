// Tensor-core products of a warpgroup (4 warps): D [64, N] f32 in registers, A [64, 16] in shared memory or registers,
// B [16, N] in shared memory. Products are asynchronous: wgmma_fence before the first that uses registers written by
// the threads, wgmma_commit after the last, wgmma_wait before the result is read.
//
// D: element [4 j + 2 i + c] of a thread is row 16 * warp + lane / 4 + 8 i, column 8 j + 2 (lane % 4) + c.
// A in registers: the D elements 8 k .. 8 k + 7 of a previous product, packed in pairs, are the A of k-step k.
#pragma once

#include <cstdint>

#include "headway/dtype.h"

namespace headway::cuda::ptx {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `pending` committed groups are unfinished.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Tells the compiler that the registers of a product change here, so that it keeps their uses on the right side of a
// wait.
template <int count>
__device__ __forceinline__ void touch(float (&values)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    asm volatile("" : "+f"(values[i])::"memory");
  }
}

template <int count>
__device__ __forceinline__ void touch(std::uint32_t (&values)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    asm volatile("" : "+r"(values[i])::"memory");
  }
}

// A tile of 16-bit elements in shared memory is panels of 64 columns, [rows][128 bytes], 1024-aligned, swizzled in
// units of 16 bytes: chunk c of row r lies at r * 128 + ((c ^ (r % 8)) * 16).
//
// Descriptors: address, leading and stride byte offsets in units of 16, and bit 62 for the 128-byte swizzle. The
// reduced axis along the columns (Q, K): 16 columns further is + 2. The reduced axis along the rows (V): 16 rows
// further is + 128, and the leading offset is the distance between panels.
__device__ __forceinline__ std::uint64_t tile_descriptor(std::uint32_t address, std::uint32_t leading_bytes) {
  constexpr std::uint64_t eight_rows = 1024;
  return (address & 0x3FFFF) >> 4 | static_cast<std::uint64_t>(leading_bytes >> 4) << 16 | (eight_rows >> 4) << 32 |
         std::uint64_t{1} << 62;
}

enum class Reduced : int { along_columns = 0, along_rows = 1 };  // how an operand lies in shared memory

template <class Half, int columns>
struct Wgmma;

// The register lists of D, and one definition for each width and type: inline assembly cannot be written over a
// template's arguments. %K is the first operand after D.
// clang-format off

#define HEADWAY_D16 "%0, %1, %2, %3, %4, %5, %6, %7"

#define HEADWAY_D32 HEADWAY_D16 \
  ", %8, %9, %10, %11, %12, %13, %14, %15"

#define HEADWAY_D48 HEADWAY_D32 \
  ", %16, %17, %18, %19, %20, %21, %22, %23"

#define HEADWAY_D64 HEADWAY_D32 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"

#define HEADWAY_D80 HEADWAY_D64 \
  ", %32, %33, %34, %35, %36, %37, %38, %39"

#define HEADWAY_D96 HEADWAY_D80 \
  ", %40, %41, %42, %43, %44, %45, %46, %47"

#define HEADWAY_D128 HEADWAY_D96 \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define HEADWAY_D176 HEADWAY_D128 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83" \
  ", %84, %85, %86, %87"

#define HEADWAY_D192 HEADWAY_D176 \
  ", %88, %89, %90, %91, %92, %93, %94, %95"

#define HEADWAY_D256 HEADWAY_D192 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107" \
  ", %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define HEADWAY_LIST8(d, i)                                                                                             \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define HEADWAY_LIST16(d, i) HEADWAY_LIST8(d, i), HEADWAY_LIST8(d, i + 8)
#define HEADWAY_OUT16 HEADWAY_LIST8(d, 0)
#define HEADWAY_OUT32 HEADWAY_LIST16(d, 0)
#define HEADWAY_OUT48 HEADWAY_OUT32, HEADWAY_LIST8(d, 16)
#define HEADWAY_OUT64 HEADWAY_OUT32, HEADWAY_LIST16(d, 16)
#define HEADWAY_OUT80 HEADWAY_OUT64, HEADWAY_LIST8(d, 32)
#define HEADWAY_OUT96 HEADWAY_OUT80, HEADWAY_LIST8(d, 40)
#define HEADWAY_OUT128 HEADWAY_OUT64, HEADWAY_LIST16(d, 32), HEADWAY_LIST16(d, 48)
#define HEADWAY_OUT176 HEADWAY_OUT128, HEADWAY_LIST8(d, 64), HEADWAY_LIST8(d, 72), HEADWAY_LIST8(d, 80)
#define HEADWAY_OUT192 HEADWAY_OUT128, HEADWAY_LIST16(d, 64), HEADWAY_LIST16(d, 80)
#define HEADWAY_OUT256 HEADWAY_OUT192, HEADWAY_LIST16(d, 96), HEADWAY_LIST16(d, 112)

#define HEADWAY_WGMMA(Half, TYPE, N, K0, K1, K2, K3, K4, K5, K6)                                                       \
  template <>                                                                                                          \
  struct Wgmma<Half, N> {                                                                                              \
    /* D = A B, or D += A B; both in shared memory, and how they lie there. */                                         \
    template <Reduced in_a = Reduced::along_columns, Reduced in_b = Reduced::along_columns>                            \
    static __device__ __forceinline__ void multiply(float (&d)[N / 2], std::uint64_t a, std::uint64_t b,               \
                                                    int accumulate) {                                                  \
      asm volatile(                                                                                                    \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #K2 ", 0;\n"                                                           \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                                              \
          " {" HEADWAY_D##N "}, %" #K0 ", %" #K1 ", p, 1, 1, %" #K3 ", %" #K4 ";\n}"                                   \
          : HEADWAY_OUT##N                                                                                             \
          : "l"(a), "l"(b), "r"(accumulate), "n"(static_cast<int>(in_a)), "n"(static_cast<int>(in_b)));                \
    }                                                                                                                  \
    template <Reduced reduced>                                                                                         \
    static __device__ __forceinline__ void multiply(float (&d)[N / 2], std::uint32_t a0, std::uint32_t a1,             \
                                                    std::uint32_t a2, std::uint32_t a3, std::uint64_t b,               \
                                                    int accumulate) {                                                  \
      asm volatile(                                                                                                    \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #K5 ", 0;\n"                                                           \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                                              \
          " {" HEADWAY_D##N "}, {%" #K0 ", %" #K1 ", %" #K2 ", %" #K3 "}, %" #K4 ", p, 1, 1, %" #K6 ";\n}"             \
          : HEADWAY_OUT##N                                                                                             \
          : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate), "n"(static_cast<int>(reduced)));              \
    }                                                                                                                  \
  };
#define HEADWAY_WGMMA_BOTH(...)                                                                                        \
  HEADWAY_WGMMA(bfloat16, "bf16", __VA_ARGS__)                                                                    \
  HEADWAY_WGMMA(float16, "f16", __VA_ARGS__)

HEADWAY_WGMMA_BOTH(16, 8, 9, 10, 11, 12, 13, 14)
HEADWAY_WGMMA_BOTH(32, 16, 17, 18, 19, 20, 21, 22)
HEADWAY_WGMMA_BOTH(48, 24, 25, 26, 27, 28, 29, 30)
HEADWAY_WGMMA_BOTH(64, 32, 33, 34, 35, 36, 37, 38)
HEADWAY_WGMMA_BOTH(80, 40, 41, 42, 43, 44, 45, 46)
HEADWAY_WGMMA_BOTH(96, 48, 49, 50, 51, 52, 53, 54)
HEADWAY_WGMMA_BOTH(128, 64, 65, 66, 67, 68, 69, 70)
HEADWAY_WGMMA_BOTH(176, 88, 89, 90, 91, 92, 93, 94)
HEADWAY_WGMMA_BOTH(192, 96, 97, 98, 99, 100, 101, 102)
HEADWAY_WGMMA_BOTH(256, 128, 129, 130, 131, 132, 133, 134)

#undef HEADWAY_D16
#undef HEADWAY_OUT16
#undef HEADWAY_D32
#undef HEADWAY_OUT32
#undef HEADWAY_D48
#undef HEADWAY_OUT48
#undef HEADWAY_D64
#undef HEADWAY_OUT64
#undef HEADWAY_D80
#undef HEADWAY_OUT80
#undef HEADWAY_D96
#undef HEADWAY_OUT96
#undef HEADWAY_D128
#undef HEADWAY_OUT128
#undef HEADWAY_D176
#undef HEADWAY_OUT176
#undef HEADWAY_D192
#undef HEADWAY_OUT192
#undef HEADWAY_D256
#undef HEADWAY_OUT256
#undef HEADWAY_LIST8
#undef HEADWAY_LIST16
#undef HEADWAY_WGMMA
#undef HEADWAY_WGMMA_BOTH
// clang-format on

}  // namespace headway::cuda::ptx
