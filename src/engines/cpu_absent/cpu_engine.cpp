// The CPU engine's symbol in a build without it.
#include "core/absent_engine.h"

namespace headway {

const EngineBase& cpu_engine() {
  static const AbsentEngine engine(Engine::cpu, "not built into this library");
  return engine;
}

}  // namespace headway
