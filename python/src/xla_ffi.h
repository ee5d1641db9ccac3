// XLA's foreign function interface (version 0.x of its C API), as far as handlers need it. Declared here
// instead of included, so that the package builds without JAX and one build serves every JAX: XLA only ever appends to
// these structs, and each begins with its size.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headway::python::xla {

constexpr int api_major = 0;

struct Error;    // XLA's own
struct Context;  // XLA's own

struct Extension {
  std::size_t struct_size;
  int kind;
  Extension* next;
};

struct Version {
  std::size_t struct_size;
  Extension* extensions;
  int major;
  int minor;
};

// What XLA asks of a handler when it is registered: the call frame then has this extension, and nothing is to be run.
constexpr int metadata_extension = 1;

struct Metadata {
  std::size_t struct_size;
  Version version;
  std::uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

enum class Code : int { cancelled = 1, unknown = 2, invalid_argument = 3, resource_exhausted = 8, unimplemented = 12 };

struct ErrorRequest {
  std::size_t struct_size;
  Extension* extensions;
  const char* message;
  Code code;
};

struct ErrorText {
  std::size_t struct_size;
  Extension* extensions;
  Error* error;
  const char* message;  // out, valid until the error is destroyed
};

struct ErrorEnd {
  std::size_t struct_size;
  Extension* extensions;
  Error* error;
};

struct StreamRequest {
  std::size_t struct_size;
  Extension* extensions;
  Context* context;
  void* stream;  // out: a CUstream
};

struct OrdinalRequest {
  std::size_t struct_size;
  Extension* extensions;
  Context* context;
  std::int32_t ordinal;  // out: as CUDA counts devices
};

struct Api {
  std::size_t struct_size;
  Extension* extensions;
  Version version;
  const void* internal;
  Error* (*create_error)(ErrorRequest*);
  void (*error_text)(ErrorText*);
  void (*destroy_error)(ErrorEnd*);
  const void* register_handler;
  Error* (*get_stream)(StreamRequest*);
  const void* unused[12];  // types, state, memory, threads, futures, the run's number
  Error* (*get_ordinal)(OrdinalRequest*);
};

enum class Type : int { boolean = 1, s32 = 4, s64 = 5, u32 = 8, f16 = 10, f32 = 11, f64 = 12, bf16 = 16 };

struct Buffer {  // dense, row-major
  std::size_t struct_size;
  Extension* extensions;
  Type type;
  void* data;
  std::int64_t rank;
  const std::int64_t* sizes;
};

struct Buffers {
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t count;
  const int* kinds;  // 1: a buffer, the only kind there is
  Buffer** buffers;
};

struct Bytes {
  const char* data;
  std::size_t size;
};

struct Scalar {
  Type type;
  const void* value;
};

enum class AttributeKind : int { array = 1, dictionary = 2, scalar = 3, string = 4 };

struct Attributes {
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t count;
  const AttributeKind* kinds;
  Bytes** names;
  void** values;  // Scalar or Bytes
};

struct CallFrame {
  std::size_t struct_size;
  Extension* extensions;
  const Api* api;
  Context* context;
  int stage;
  Buffers arguments;
  Buffers results;
  Attributes attributes;
};

}  // namespace headway::python::xla
