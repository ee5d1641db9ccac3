#include "core/out_of_memory.h"

#include <new>
#include <stdexcept>

#include "core/text.h"
#include "headway/error.h"

namespace headway {
namespace {

// Copies of an exception share its text. Never destroyed: an allocation may fail in a static destructor too.
const OutOfMemory* const spare = new OutOfMemory("headway: could not allocate memory");

[[noreturn]] void refuse(std::string_view operation) {
  try {
    throw OutOfMemory(text(operation, ": could not allocate memory"));
  } catch (const std::bad_alloc&) {
    throw OutOfMemory(*spare);
  }
}

}  // namespace

void throw_own_error(std::string_view operation) {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    refuse(operation);
  } catch (const std::length_error&) {  // a container of more elements than there can be
    refuse(operation);
  }
}

}  // namespace headway
