// The answers of a server of the page: which requests it refuses, and that every part is that of the matrix.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "attention/cuda_engine.h"
#include "headway/headway.h"
#include "support/device_mirror.h"
#include "support/inputs.h"

namespace headway::test {
namespace {

constexpr const char* own_host = "127.0.0.1:8000";

class Live : public testing::Test {
 protected:
  void show(std::span<const ViewLayer> layers) {
    view_ = std::make_unique<LiveView>(layers);
    const std::string address = view_->address(own_host);
    path_ = address.substr(address.find(own_host) + std::strlen(own_host));
  }
  void show(const Inputs& inputs, const AttentionOptions& options = {}) {
    const ViewLayer layer{inputs.q, inputs.k, options};
    show(std::span(&layer, 1));
  }

  ViewAnswer ask(const std::string& target, const std::string& host = own_host) const {
    return view_->answer(target, host, own_host);
  }

  // Cells as the protocol sends them.
  struct Grid {
    std::int32_t row_begin, key_begin, row_cell, key_cell, rows, columns;
  };
  struct Cells : Grid {
    std::vector<float> mean, max;
  };
  Cells tile(const std::string& query) const {
    const ViewAnswer answer = ask(path_ + "tile?" + query);
    EXPECT_EQ(answer.status, 200) << query;
    Cells cells{};
    std::memcpy(static_cast<Grid*>(&cells), answer.body.data(), sizeof(Grid));
    const auto count = static_cast<std::size_t>(cells.rows * cells.columns);
    EXPECT_EQ(answer.body.size(), 24 + 8 * count);
    cells.mean.resize(count);
    cells.max.resize(count);
    std::memcpy(cells.mean.data(), answer.body.data() + 24, 4 * count);
    std::memcpy(cells.max.data(), answer.body.data() + 24 + 4 * count, 4 * count);
    return cells;
  }

  std::unique_ptr<LiveView> view_;
  std::string path_;
};

TEST_F(Live, refuses_who_does_not_know_the_path_or_comes_by_another_name) {
  const Inputs inputs = random_inputs({.queries = 6, .keys = 6});
  show(inputs);
  EXPECT_EQ(path_.size(), 28u);
  EXPECT_EQ(ask(path_).status, 200);
  EXPECT_NE(ask(path_).body.find("connect-src 'self'"), std::string::npos);
  for (const char* target : {"/", "", "/tile?head=0&r0=0&r1=1&k0=0&k1=1", "/../etc/passwd", "*"}) {
    EXPECT_EQ(ask(target).status, 404) << target;
  }
  EXPECT_EQ(ask(path_ + "other").status, 404);
  EXPECT_EQ(ask(path_ + "../../etc/passwd").status, 404);
  EXPECT_EQ(ask(path_.substr(0, path_.size() - 1)).status, 404);
  for (const char* host : {"localhost", "localhost:8000", "127.0.0.1:9000", "[::1]", "[::1]:8000"}) {
    EXPECT_EQ(ask(path_, host).status, 200) << host;  // a tunnel comes in by another port
  }
  for (const char* host :
       {"", ":8000", "localhost.example.org", "example.org:localhost", "[::1", "127.0.0.2", "example.org"}) {
    EXPECT_EQ(ask(path_, host).status, 403) << host;
    EXPECT_EQ(ask(path_, host).body, "headway: this page is for this machine alone, under its own name: localhost\n");
  }
  EXPECT_EQ(ask("/").body, "headway: the address is not complete: it is the one that was printed, to its end\n");
  show(inputs);
  const std::string first = path_;
  show(inputs);
  EXPECT_NE(path_, first);
}

TEST_F(Live, refuses_parts_that_are_not_there) {
  const Inputs inputs = random_inputs({.batch = 1, .heads = 2, .kv_heads = 1, .queries = 6, .keys = 5});
  show(inputs);
  for (const char* query :
       {"", "head=0", "head=2&r0=0&r1=1&k0=0&k1=1", "head=-1&r0=0&r1=1&k0=0&k1=1", "head=0&r0=0&r1=7&k0=0&k1=5",
        "head=0&r0=0&r1=6&k0=0&k1=6", "head=0&r0=3&r1=3&k0=0&k1=5", "head=0&r0=-1&r1=6&k0=0&k1=5",
        "head=0&r0=0x&r1=6&k0=0&k1=5", "head=99999999999999999999&r0=0&r1=6&k0=0&k1=5"}) {
    EXPECT_EQ(ask(path_ + "tile?" + query).status, 400) << query;
  }
  for (const char* query : {"", "head=0&i=6", "head=0&i=-1", "head=5&i=0"}) {
    EXPECT_EQ(ask(path_ + "row?" + query).status, 400) << query;
  }
}

TEST_F(Live, single_cells_and_rows_are_those_of_the_right_layer) {
  const Inputs one = random_inputs({.batch = 1, .heads = 2, .kv_heads = 1, .queries = 6, .keys = 6});
  const Inputs two = random_inputs({.batch = 2, .heads = 3, .kv_heads = 3, .queries = 6, .keys = 6}, DType::f32, 9);
  const AttentionOptions causal{.causal = Causal::square};
  const std::vector<ViewLayer> layers{{one.q, one.k}, {two.q, two.k, causal}};
  show(layers);
  // Head 6 of the page is head 1 of item 1 of layer 1.
  const Tensor weights = weights_in(two.q, two.k, {0, 6, 0, 6}, causal);
  const Cells cells = tile("head=6&r0=2&r1=5&k0=1&k1=6");
  EXPECT_EQ(cells.rows, 3);
  EXPECT_EQ(cells.columns, 5);
  for (int r = 0; r < 3; ++r) {
    for (int c = 0; c < 5; ++c) {
      EXPECT_NEAR(cells.max[static_cast<std::size_t>(r * 5 + c)], weights.at<float>({1, 1, r + 2, c + 1}), 1e-6);
    }
  }
  const ViewAnswer row = ask(path_ + "row?head=6&i=1");
  ASSERT_EQ(row.body.size(), 16u);  // causal: two keys
  std::int32_t keys[2];
  float found[2];
  std::memcpy(keys, row.body.data(), 8);
  std::memcpy(found, row.body.data() + 8, 8);
  EXPECT_GE(found[0], found[1]);
  EXPECT_NEAR(found[0], weights.at<float>({1, 1, 1, keys[0]}), 1e-6);
  EXPECT_NEAR(found[0] + found[1], 1.0, 1e-5);
}

// Long enough that the whole does not come from its scores but from the map that was made with the overview.
TEST_F(Live, wide_parts_are_the_means_and_maxima_of_the_matrix) {
  const Inputs inputs =
      random_inputs({.batch = 1, .heads = 1, .kv_heads = 1, .queries = 20'011, .keys = 16'100, .head_dim = 4});
  const AttentionOptions options{.window = Window{500, 500}};
  show(inputs, options);
  const Tensor lse = analyze(inputs.q, inputs.k, options, {.top = 0, .cells = 0}).lse;
  const auto check = [&](const std::string& part, bool merged) {
    const Cells cells = tile("head=0&" + part);
    EXPECT_EQ(cells.row_begin % cells.row_cell == 0 && cells.key_begin % cells.key_cell == 0, merged) << part;
    EXPECT_LE(std::max(cells.rows, cells.columns), 514);
    const Rectangle covered{cells.row_begin, std::min(20'011, cells.row_begin + cells.rows * cells.row_cell),
                            cells.key_begin, std::min(16'100, cells.key_begin + cells.columns * cells.key_cell)};
    const TileMap map = tile_map(inputs.q, inputs.k, lse, 0, 0, covered, cells.row_cell, cells.key_cell, options);
    for (std::int64_t r = 0; r < cells.rows; ++r) {
      for (std::int64_t c = 0; c < cells.columns; ++c) {
        const auto at = static_cast<std::size_t>(r * cells.columns + c);
        const double mean = map.mean.at<float>({r, c}), max = map.max.at<float>({r, c});
        ASSERT_NEAR(cells.mean[at], mean, 0.005 * mean + 1e-12) << part << " cell " << r << ", " << c;
        ASSERT_NEAR(cells.max[at], max, 0.005 * max + 1e-12) << part << " cell " << r << ", " << c;
      }
    }
  };
  check("r0=0&r1=20011&k0=0&k1=16100", true);
  check("r0=3001&r1=20007&k0=77&k1=16099", true);
  check("r0=19003&r1=20011&k0=15001&k1=16100", false);
}

// Query and key stay on the device; what a browser gets is what it gets from the same tensors in host memory.
class CudaLive : public Live {
 protected:
  void SetUp() override { skip_without_cuda(); }
};

TEST_F(CudaLive, parts_and_rows_from_a_gpu_are_those_from_host_memory) {
  struct Case {
    std::int64_t queries, keys;
    DType type;
    std::string part;
  };
  // The last one's whole comes from the map that was made with the overview: it is too long to compute on any device.
  const Case cases[] = {{90, 130, DType::f32, "head=3&r0=7&r1=90&k0=0&k1=111"},
                        {90, 130, DType::bf16, "head=0&r0=0&r1=90&k0=0&k1=130"},
                        {16'500, 16'400, DType::f16, "head=1&r0=0&r1=16500&k0=0&k1=16400"}};
  for (const Case& one : cases) {
    SCOPED_TRACE(one.part);
    const Inputs inputs = random_inputs({.batch = 1,
                                         .heads = one.queries > 90 ? 2 : 4,
                                         .kv_heads = 1,
                                         .queries = one.queries,
                                         .keys = one.keys,
                                         .head_dim = 16},
                                        one.type);
    const AttentionOptions options{.causal = Causal::bottom_right, .window = Window{1000, {}}};
    show(inputs, options);
    const Cells expected = tile(one.part);
    const ViewAnswer expected_row = ask(path_ + "row?head=1&i=80");

    ConstTensorView q = inputs.q, k = inputs.k;
    DeviceMirror mirror;
    mirror.add(q);
    mirror.add(k);
    mirror.place();
    const ViewLayer layer{q, k, options};
    show(std::span(&layer, 1));
    const Cells found = tile(one.part);
    ASSERT_EQ(found.rows, expected.rows);
    ASSERT_EQ(found.columns, expected.columns);
    for (std::size_t at = 0; at < found.mean.size(); ++at) {
      ASSERT_NEAR(found.mean[at], expected.mean[at], 0.005 * static_cast<double>(expected.mean[at]) + 1e-7);
      ASSERT_NEAR(found.max[at], expected.max[at], 0.005 * static_cast<double>(expected.max[at]) + 1e-7);
    }
    const ViewAnswer row = ask(path_ + "row?head=1&i=80");
    ASSERT_EQ(row.body.size(), expected_row.body.size());
    EXPECT_EQ(row.body.substr(0, 4), expected_row.body.substr(0, 4));  // the strongest key
  }
}

}  // namespace
}  // namespace headway::test
