#include "engines/cuda/cublas_lt.h"

#include <dlfcn.h>

#include <mutex>
#include <string>
#include <vector>

#include "core/text.h"
#include "engines/cuda/device.h"
#include "headway/error.h"

namespace headway::cuda::lt {
namespace {

// The one of the CUDA that this was built with; then whichever is there.
std::vector<std::string> usual_names() {
  return {text("libcublasLt.so.", CUDART_VERSION / 1000), "libcublasLt.so", "libcublasLt.so.13", "libcublasLt.so.12"};
}

template <class Function>
void find(void* opened, const char* name, Function& function, std::string_view operation) {
  function = reinterpret_cast<Function>(dlsym(opened, name));
  if (function == nullptr) {
    throw Unsupported(text(operation, ": the cuBLASLt that was found has no ", name, ": ", dlerror()));
  }
}

}  // namespace

Library load(std::string_view operation, const char* name) {
  void* opened = nullptr;
  std::string reason;
  const std::vector<std::string> names = *name == '\0' ? usual_names() : std::vector<std::string>{name};
  for (std::size_t n = 0; n < names.size() && opened == nullptr; ++n) {
    opened = dlopen(names[n].c_str(), RTLD_NOW | RTLD_LOCAL);
    if (opened == nullptr && n == 0) {
      reason = dlerror();
    }
  }
  if (opened == nullptr) {
    throw Unsupported(text(operation, ": projections on a GPU need cuBLASLt, part of the CUDA toolkit, and ", names[0],
                           " could not be loaded: ", reason));
  }
  Library result{};
#define FIND(function) find(opened, #function, result.function, operation)
  FIND(cublasLtCreate);
  FIND(cublasLtMatmulDescCreate);
  FIND(cublasLtMatmulDescDestroy);
  FIND(cublasLtMatmulDescSetAttribute);
  FIND(cublasLtMatrixLayoutCreate);
  FIND(cublasLtMatrixLayoutDestroy);
  FIND(cublasLtMatmulPreferenceCreate);
  FIND(cublasLtMatmulPreferenceDestroy);
  FIND(cublasLtMatmulPreferenceSetAttribute);
  FIND(cublasLtMatmulAlgoGetHeuristic);
  FIND(cublasLtMatmul);
  FIND(cublasLtGetStatusString);
#undef FIND
  return result;
}

const Library& library(std::string_view operation) {
  static const Library loaded = load(operation);  // tried again after a failure
  return loaded;
}

Handle handle(int device, std::string_view operation) {
  static std::mutex& mutex = *new std::mutex;
  static std::vector<Handle>& handles = *new std::vector<Handle>(static_cast<std::size_t>(device_count()), nullptr);
  const std::lock_guard lock(mutex);
  Handle& one = handles[static_cast<std::size_t>(device)];
  if (one == nullptr) {
    check(library(operation).cublasLtCreate(&one), operation, text("starting cuBLASLt on cuda:", device));
  }
  return one;
}

void check(Status status, std::string_view operation, std::string_view what) {
  if (status != 0) {
    throw DeviceError(
        text(operation, ": ", what, ": cuBLASLt says ", library(operation).cublasLtGetStatusString(status)));
  }
}

}  // namespace headway::cuda::lt
