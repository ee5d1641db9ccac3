// The errors that Headway throws. Every text starts with the operation and says what was expected and what was found:
// "attention: key has head_dim 80, query has 64". Quoted parts, such as a file's name, are made printable().
#pragma once

#include <stdexcept>
#include <string_view>

#include "headway/cxx20.h"

#pragma GCC visibility push(default)
namespace headway {

class Error : public std::runtime_error {
 public:
  explicit Error(std::string_view text);
};

// A value, shape or layout that the operation does not accept.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

// An element type that the operation does not accept, or two that should be equal.
class TypeMismatch : public Error {
 public:
  using Error::Error;
};

// An allocation that the system refused. The library stays usable.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

// Too few free pages in a KVCache. The cache is unchanged.
class OutOfPages : public OutOfMemory {
 public:
  using OutOfMemory::OutOfMemory;
};

// A sequence that a KVCache does not have: never added, or removed. The cache is unchanged.
class UnknownSequence : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

// Something that the contract allows, but that this build or the requested engine cannot do.
class Unsupported : public Error {
 public:
  using Error::Error;
};

// An error of a device or its driver: a failed launch, a lost device. The text contains the driver's message.
class DeviceError : public Error {
 public:
  using Error::Error;
};

// A file that cannot be read or written, or that violates its format.
class FileError : public Error {
 public:
  using Error::Error;
};

// The caller's progress callback asked to stop.
class Cancelled : public Error {
 public:
  using Error::Error;
};

}  // namespace headway
#pragma GCC visibility pop
