#include "engines/cuda/kernels/short_gradient_instances.cuh"

namespace headway::cuda {

// Up to 64 keys: many small blocks a multiprocessor where there are many heads, else blocks of more threads, which end
// sooner. The sums, and so the bits, are the same.
Launch short_gradient_64(const ShortGradientArguments& arguments, DType dtype) {
  if (arguments.key_len > 128) {
    return short_gradient_of<64, 16, 1, 1>(arguments, dtype);
  }
  if (arguments.key_len > 64) {
    return short_gradient_of<64, 8, 1, 2>(arguments, dtype);
  }
  return arguments.batch * arguments.kv_heads > 2 * device_properties(current_device()).multiprocessors
             ? short_gradient_of<64, 4, 1, 4>(arguments, dtype)
             : short_gradient_of<64, 4, 2, 2>(arguments, dtype);
}

}  // namespace headway::cuda
