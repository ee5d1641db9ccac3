#include "core/engine.h"
#include "core/memory.h"
#include "headway/threads.h"

namespace headway {

std::int64_t release_memory() {
  std::int64_t bytes = release_cached_memory();
  for (const EngineBase* engine : engine_list()) {
    bytes += engine->release_memory();
  }
  release_cached_memory();  // what the engines gave back went there
  return bytes;
}

}  // namespace headway
