// A build without zlib.
#include <gtest/gtest.h>

#include "headway/io.h"

namespace headway {
namespace {

TEST(Npz, a_build_without_zlib_says_so) {
  EXPECT_THROW(load_npz("any.npz"), Unsupported);
  EXPECT_THROW(save_npz("any.npz", {}), Unsupported);
}

}  // namespace
}  // namespace headway
