// A mask as text for a terminal.
#pragma once

#include <string>

#include "masks/node.h"

namespace headway {

std::string drawing_of(const MaskNode& node, MaskSizes sizes);

}  // namespace headway
