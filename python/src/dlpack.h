// The DLPack 1.x ABI, as far as it is used here: tensors in capsules, and the table of C functions that a type may
// offer as __dlpack_c_exchange_api__. Field order and sizes are DLPack's.
#pragma once

#include <cstdint>

namespace headway::python::dlpack {

struct Version {
  std::uint32_t major, minor;
};

enum class Code : std::uint8_t {
  integer = 0,
  unsigned_integer = 1,
  floating = 2,
  bfloat = 4,
  complex = 5,
  boolean = 6,
  float8_e4m3fn = 10
};

struct Type {
  Code code;
  std::uint8_t bits;
  std::uint16_t lanes;
  bool operator==(const Type&) const = default;
};

enum class DeviceKind : std::int32_t { cpu = 1, cuda = 2, cuda_host = 3, rocm_host = 11, cuda_managed = 13 };

inline bool is_cuda(DeviceKind kind) { return kind == DeviceKind::cuda || kind == DeviceKind::cuda_managed; }

struct Device {
  DeviceKind kind;
  std::int32_t index;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t rank;
  Type type;
  std::int64_t* sizes;
  std::int64_t* strides;  // in elements; may be null for a contiguous tensor
  std::uint64_t byte_offset;
};

struct ManagedTensor {  // in a capsule "dltensor"
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

inline constexpr std::uint64_t flag_read_only = 1;

struct ManagedTensorVersioned {  // in a capsule "dltensor_versioned"
  Version version;
  void* context;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};

struct ExchangeApi {  // in a capsule "dlpack_exchange_api"
  using SetError = void (*)(void* context, const char* kind, const char* message);
  Version version;
  ExchangeApi* older;
  int (*allocate)(Tensor* prototype, ManagedTensorVersioned** result, void* error_context, SetError set_error);
  int (*managed_from_object)(void* object, ManagedTensorVersioned** result);
  int (*managed_to_object)(ManagedTensorVersioned* tensor, void** object);  // takes the tensor over
  int (*tensor_from_object)(void* object, Tensor* result);                  // borrows; may be null
  int (*current_stream)(std::int32_t device, std::int32_t index, void** stream);
};

}  // namespace headway::python::dlpack
