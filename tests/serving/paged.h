// Keys and values in pages with hostile contents in unused places, and the same rows gathered.
#pragma once

#include <cstdint>
#include <vector>

#include "headway/serving.h"
#include "support/inputs.h"

namespace headway::test {

struct PagedShape {
  std::vector<std::int64_t> lengths;
  std::int64_t page_size = 16;
  std::int64_t kv_heads = 2, head_dim = 24, value_dim = 20;
  DType type = DType::f32;        // of the pages; i8 and f8e4m3 come with scales
  DType table_type = DType::i32;  // of the table and the lengths
  Layout layout = Layout::contiguous;
  bool shared_prefix = false;  // the pages that the shortest sequence fills are those of all sequences
  std::uint64_t seed = 1;
};

// Pages in random order. What no sequence owns is NaN (of 8-bit pages, its scales are): unused slots, whole pages
// between the used ones; table entries behind a sequence's pages are out of range.
struct PagedInputs {
  explicit PagedInputs(const PagedShape& shape);

  PagedKeys keys() const;

  PagedShape shape;
  Strided key_pages, value_pages;
  Tensor table, lengths, key_scales, value_scales;
  std::vector<Tensor> gathered_keys, gathered_values;  // of each sequence [1,Hkv,length,D]; float32 where scaled

 private:
  void fill(std::int64_t sequence, std::int64_t token, std::int64_t page, Random& random);
};

// The call on gathered rows that sequence b of a paged one is like; a query beside 8-bit pages must be f32.
Call gathered_call(const PagedInputs& inputs, std::int64_t b, ConstTensorView query, const AttentionOptions& options);

}  // namespace headway::test
