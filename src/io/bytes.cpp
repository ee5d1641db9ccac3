// In a file of its own because g++ 12, when it inlines this, warns of an overflow that cannot happen.
#include "io/bytes.h"

namespace headway::io {

void append_bytes(Bytes& bytes, std::span<const std::byte> more) {
  bytes.insert(bytes.end(), more.begin(), more.end());
}

}  // namespace headway::io
