// A build without nlohmann-json.
#include <gtest/gtest.h>

#include "headway/io.h"

namespace headway {
namespace {

TEST(Safetensors, a_build_without_a_json_parser_says_so) {
  EXPECT_THROW(load_safetensors("any.safetensors"), Unsupported);
  EXPECT_THROW(save_safetensors("any.safetensors", {}), Unsupported);
}

}  // namespace
}  // namespace headway
