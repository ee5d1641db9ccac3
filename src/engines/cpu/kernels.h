// The kernels of one instruction set, and the choice among those that this machine has.
#pragma once

#include <cstdint>
#include <vector>

#include "engines/cpu/gemm/args.h"
#include "engines/cpu/kernel/args.h"
#include "engines/cpu/kernel/backward_args.h"
#include "engines/cpu/kernel/decode_args.h"

namespace headway::cpu {

struct ForwardKernel {
  void (*run)(const ForwardArgs& args, void* scratch);
  void (*run_scores)(const ForwardArgs& args, void* scratch);  // args.weights takes the scores before the softmax
  std::int64_t (*scratch_bytes)(const ForwardArgs& args, std::int64_t panels);
  int panel_rows;   // queries that one panel holds
  int most_panels;  // that share a block of keys with profit
  int key_block;
  std::int64_t short_keys = 0;  // sequences of up to so many keys are done at once
};

// kernel/decode_args.h says what a chunk is. First run() for every chunk, then finish(), then run_weights() for every
// chunk where weights are wanted.
struct DecodeKernel {
  void (*run)(const DecodeArgs& args, std::int64_t chunk, void* scratch);
  void (*finish)(const DecodeArgs& args);
  void (*run_weights)(const DecodeArgs& args, std::int64_t chunk, void* scratch);
  std::int64_t (*scratch_bytes)(const DecodeArgs& args);
  std::int64_t (*partial_bytes)(const DecodeArgs& args);
  int most_queries;  // of a head: with more, panels of queries are faster
  // run() for several kv heads of a sequence, a few keys of each in turn, and the scratch for each; null: not done.
  // They have no spans, their rows of K and V lie at one distance from each to the next, and they have at most
  // most_rows_in_turn rows.
  void (*run_in_turns)(const DecodeArgs* heads, int count, std::int64_t chunk, void* scratch) = nullptr;
  std::int64_t (*turn_scratch_bytes)(const DecodeArgs& args) = nullptr;
};

// kernel/backward_args.h says what each task does and may read.
struct BackwardKernel {
  bool (*is_short)(const BackwardArgs& args);  // whether P and dS are kept whole, and no dq partials
  int (*chunk_count)(std::int64_t keys);
  KeyChunks (*cut)(const BackwardArgs& args);
  double (*prepare)(const BackwardArgs& args, const BackwardHead& head, std::int64_t row_begin, std::int64_t row_end,
                    void* scratch);
  std::int64_t (*prepare_scratch_bytes)(const BackwardArgs& args);
  void (*gradients)(const BackwardArgs& args, int chunk, void* scratch);
  std::int64_t (*scratch_bytes)(const BackwardArgs& args);
  void (*sum_queries)(const BackwardArgs& args, const BackwardHead& head, std::int64_t row_begin, std::int64_t row_end);
  void (*sum_keys)(const BackwardArgs& args, std::int64_t key_begin, std::int64_t key_end);
  void (*bias)(const BiasRegion& region, void* scratch);
  std::int64_t (*bias_scratch_bytes)(const BiasRegion& region);
  int region_rows, region_keys;  // of a bias region where they are not summed over
  int lanes;                     // rows of dq partials are padded to these
  int scalar_bytes;              // of the compute type
};

struct GemmKernel {
  void (*run)(const GemmArgs& args, void* scratch);
  std::int64_t (*scratch_bytes)(const GemmArgs& args);
  // found[r]: whether row r of `right` is 0 everywhere.
  void (*find_zero_rows)(const GemmArgs& args, std::int64_t begin, std::int64_t end, std::uint8_t* found);
  // Whether rows begin .. end of a matrix may go through products of pairs; null where the kernel has none.
  bool (*suits_pairs)(const ItemRows<const void>& matrix, std::int64_t begin, std::int64_t end, std::int64_t columns);
  int panel_columns;
  int least_panels = 4;       // of a task, unless it takes fewer to have enough tasks
  int tasks_of_a_thread = 6;  // that are enough
};

struct Kernels {
  const char* name;
  ForwardKernel forward[4];  // by Storage
  DecodeKernel decode[4];
  BackwardKernel backward[4];
  GemmKernel gemm[4];
  // For queries of each Storage except f64 with 8-bit rows. These are multiplied as floats, even if another type is
  // fastest for the queries' own type.
  ForwardKernel scaled_forward[4];
  DecodeKernel scaled_decode[2][4];  // by ScaledAs, of those that are scaled, and Storage
};

struct DoubleKernels {
  ForwardKernel forward;
  DecodeKernel decode;
  BackwardKernel backward;
  GemmKernel gemm;
};

// Each is defined in isa/, if the target architecture has it.
const Kernels& scalar_kernels();
const Kernels& neon_kernels();
const Kernels& avx2_kernels();
bool avx512_is_built();  // false where it and all that follow are left out
const Kernels& avx512_kernels();
const Kernels& avx512_bf16_kernels();
bool amx_is_built();
const Kernels& amx_kernels();
const Kernels* emulated_amx_kernels();  // null where it is not built

// The f64 kernels of each instruction set.
DoubleKernels scalar_f64_kernels();
DoubleKernels neon_f64_kernels();
DoubleKernels avx2_f64_kernels();
DoubleKernels avx512_f64_kernels();

// The instruction sets that this build has and this CPU runs, the fastest first, those emulated for tests last.
std::vector<const Kernels*> available_kernels();

// The fastest, or the one that HEADWAY_ISA names; InvalidArgument when this machine does not have that one.
const Kernels& chosen_kernels();

// For tests: later calls run on these instead.
void choose_kernels(const Kernels& kernels);

}  // namespace headway::cpu
