// The CUDA engine's symbol in a build without it.
#include "core/absent_engine.h"

namespace headway {

const EngineBase& cuda_engine() {
  static const AbsentEngine engine(Engine::cuda, "not built into this library");
  return engine;
}

}  // namespace headway
