// A plan: what one attention call will run, and why. explain() prints it.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

#include "headway/cxx20.h"

#pragma GCC visibility push(default)
namespace headway {

enum class Engine : std::uint8_t { automatic, reference, cpu, cuda };

const char* name(Engine engine);
std::ostream& operator<<(std::ostream& stream, Engine engine);

// The engines that this build and this machine offer, the fastest first.
std::vector<Engine> engines();

struct Plan {
  // An engine that comes before the chosen one, and why it was not chosen.
  struct PassedOver {
    Engine engine;
    std::string reason;
  };

  // The same for a kernel of the chosen engine.
  struct PassedKernel {
    std::string kernel;
    std::string reason;
  };

  Engine engine = Engine::reference;
  std::string operation;         // "attention", "attention_backward", ...
  std::string kernel;            // the engine's name for the kernel
  std::string instruction_set;   // what the kernel was compiled for
  std::string shape;             // "query (2, 8, 128, 64) f32, key (2, 2, 128, 64), value (2, 2, 128, 64)"
  std::string options;           // the options in force: "causal bottom_right, window (128, 0)"
  std::int64_t query_block = 1;  // queries and keys in one tile
  std::int64_t key_block = 1;
  std::int64_t tasks = 0;         // independent pieces of work
  int threads = 1;                // on a GPU: per block
  int splits = 1;                 // tasks that share the keys of one row and whose results are merged
  int stages = 0;                 // on a GPU: tiles of keys in flight
  int registers = 0;              // on a GPU: per thread
  std::int64_t shared_bytes = 0;  // on a GPU: of a block
  double pairs = 0;               // (query, key) pairs that the key ranges leave to visit
  double all_pairs = 0;           // batch * heads * queries * keys
  double flops = 0;               // 2 (D + Dv) per visited pair forward, 2.5 times that backward
  double bytes = 0;               // the inputs and outputs, each once
  double scratch_bytes = 0;       // bytes of memory allocated besides the outputs
  std::vector<PassedOver> passed_over;
  std::vector<PassedKernel> passed_kernels;  // set by explain() only, since the reasons would cost each call time
  std::shared_ptr<const void> decision;      // the engine's choice, for its own passes
};

std::ostream& operator<<(std::ostream& stream, const Plan& plan);
std::string to_string(const Plan& plan);

}  // namespace headway
#pragma GCC visibility pop
