// In its own file because g++ 12 warns of an overflow that cannot happen when it inlines this.
#include "io/bytes.h"

namespace headway::io {

void append_bytes(Bytes& bytes, std::span<const std::byte> more) {
  bytes.insert(bytes.end(), more.begin(), more.end());
}

}  // namespace headway::io
