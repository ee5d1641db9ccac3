// headway attend computes what the library computes, with every option.
#include <cmath>
#include <limits>

#include "cli_support.h"

namespace headway::test {
namespace {

class Attend : public CommandTest {
 protected:
  static Tensor attended(ConstTensorView q, ConstTensorView k, ConstTensorView v, const AttentionOptions& options = {},
                         const AttentionOutputs& outputs = {}) {
    Dims sizes = q.sizes();
    sizes[sizes.size() - 1] = v.sizes().back();
    Tensor out(sizes, q.dtype());
    attention(q, k, v, out, options, outputs);
    return out;
  }

  Finished attend(const Arguments& more) const {
    Arguments arguments = {"attend", "q.npy", "k.npy", "v.npy", "-o", "out.npy", "--force"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  }
};

TEST_F(Attend, equals_the_library_for_arrays_of_4_3_and_2_axes) {
  for (const auto& [q_sizes, k_sizes, v_sizes] :
       std::vector<std::array<Dims, 3>>{{{{2, 4, 5, 8}, {2, 2, 6, 8}, {2, 2, 6, 3}}},
                                        {{{3, 5, 8}, {3, 6, 8}, {3, 6, 8}}},
                                        {{{5, 8}, {6, 8}, {6, 2}}}}) {
    for (const char* name : {"q.npy", "k.npy", "v.npy"}) {
      std::filesystem::remove(file(name));
    }
    const Tensor q = save_random("q.npy", q_sizes, 1);
    const Tensor k = save_random("k.npy", k_sizes, 2);
    const Tensor v = save_random("v.npy", v_sizes, 3);
    const Finished finished = attend({});
    ASSERT_EQ(finished.code, 0) << finished.err;
    EXPECT_TRUE(same_bits(load_npy(file("out.npy")), attended(q, k, v)));
  }
}

TEST_F(Attend, keeps_the_type_of_its_inputs) {
  for (const DType dtype : {DType::f32, DType::f64, DType::f16}) {
    const Tensor x = random_tensor({3, 4}, 1, dtype);
    for (const char* name : {"q.npy", "k.npy", "v.npy"}) {
      save_npy(file(name), x, {.overwrite = true});
    }
    ASSERT_EQ(attend({}).code, 0);
    EXPECT_TRUE(same_bits(load_npy(file("out.npy")), attended(x, x, x))) << dtype;
  }
}

TEST_F(Attend, summarises_each_output_in_one_line) {
  save_random("q.npy", {2, 3, 4, 5}, 1);
  save_random("k.npy", {2, 3, 6, 5}, 2);
  save_random("v.npy", {2, 3, 6, 7}, 3);
  const Finished finished = attend({"--engine", "reference", "--weights", "w.npy", "--lse", "lse.npy"});
  EXPECT_EQ(finished.code, 0);
  EXPECT_EQ(finished.err, "");
  EXPECT_EQ(finished.out.find("out.npy  (2, 3, 4, 7) f32  reference engine  "), 0u) << finished.out;
  EXPECT_NE(finished.out.find(" ms\nw.npy  (2, 3, 4, 6) f32\nlse.npy  (2, 3, 4) f32\n"), std::string::npos)
      << finished.out;
}

// ---- Each option reaches the computation ----

struct OptionCase {
  std::string name;
  Arguments flags;
  std::function<void(AttentionOptions&)> set;
};

class AttendOption : public Attend {
 protected:
  // q [2,2,4,6], k and v [2,2,4,6]; mask, bias and the like as files beside them.
  AttendOption() {
    q_ = save_random("q.npy", {2, 2, 4, 6}, 1);
    k_ = save_random("k.npy", {2, 2, 4, 6}, 2);
    v_ = save_random("v.npy", {2, 2, 4, 6}, 3);
    save_npy(file("mask.npy"), mask_);
    save_npy(file("spans.npy"), spans_);
    save_npy(file("bias.npy"), bias_);
    save_npy(file("lens.npy"), lens_);
    save_npz(file("more.npz"), {{"lens32", lens32_}, {"slopes", slopes_}});
    save_safetensors(file("more.safetensors"), {{"sinks", sinks_}, {"bias", bias_}});
  }

  std::vector<OptionCase> cases() const {
    using O = AttentionOptions;
    return {
        {"causal", {"--causal"}, [](O& o) { o.causal = Causal::square; }},
        {"causal before files", {"--causal", "--scale", "2"}, [](O& o) { o.causal = Causal::square, o.scale = 2; }},
        {"top_left", {"--causal", "top_left"}, [](O& o) { o.causal = Causal::top_left; }},
        {"bottom_right",
         {"--causal=bottom_right", "--valid-lens", "3,2"},
         [this](O& o) { o.causal = Causal::bottom_right, o.valid_lens = short_lens_; }},
        {"window",
         {"--window", "1,0"},
         [](O& o) {
           o.window = Window{1, 0};
         }},
        {"half a window",
         {"--window", "none,0"},
         [](O& o) {
           o.window = Window{{}, 0};
         }},
        {"the other half",
         {"--window", "0,none"},
         [](O& o) {
           o.window = Window{0, {}};
         }},
        {"valid_lens inline", {"--valid-lens", "3,2"}, [this](O& o) { o.valid_lens = short_lens_; }},
        {"valid_lens for each query", {"--valid-lens", "lens.npy"}, [this](O& o) { o.valid_lens = lens_; }},
        {"valid_lens of 32 bits", {"--valid-lens", "more.npz:lens32"}, [this](O& o) { o.valid_lens = lens32_; }},
        {"query_lens", {"--query-lens", "3,2"}, [this](O& o) { o.query_lens = short_lens_; }},
        {"mask", {"--mask", "mask.npy"}, [this](O& o) { o.mask = mask_; }},
        {"mask file of bools", {"--mask-file", "mask.npy"}, [this](O& o) { o.mask = mask_; }},
        {"mask file of spans",
         {"--mask-file", "spans.npy", "--span-rows", "2"},
         [this](O& o) { o.spans = spans_, o.span_rows = 2; }},
        {"bias", {"--bias", "bias.npy"}, [this](O& o) { o.bias = bias_; }},
        {"bias in a container", {"--bias", "more.safetensors:bias"}, [this](O& o) { o.bias = bias_; }},
        {"scale", {"--scale", "-0.75"}, [](O& o) { o.scale = -0.75; }},
        {"softcap", {"--softcap", "0.5"}, [](O& o) { o.softcap = 0.5; }},
        {"alibi inline", {"--alibi-slopes", "0.5,0.25"}, [this](O& o) { o.alibi_slopes = slopes_; }},
        {"alibi in a container", {"--alibi-slopes", "more.npz:slopes"}, [this](O& o) { o.alibi_slopes = slopes_; }},
        {"sinks inline", {"--sinks", "1,-1.5"}, [this](O& o) { o.sinks = sinks_; }},
        {"sinks in a container", {"--sinks", "more.safetensors:sinks"}, [this](O& o) { o.sinks = sinks_; }},
        {"dropout",
         {"--dropout", "0.5", "--seed", "18446744073709551615"},
         [](O& o) { o.dropout = 0.5, o.seed = ~0ull; }},
    };
  }

  Tensor q_, k_, v_;
  const Tensor mask_ = Tensor::of<bool>({4, 4}, {true, false, true, true, false, true, true, true,  //
                                                 true, true, false, true, true, true, true, false});
  const Tensor spans_ = Tensor::of<std::int64_t>({2, 2, 2}, {3, 4, 0, 1, 1, 3, 2, 2});
  const Tensor bias_ = random_tensor({2, 1, 4, 4}, 4);
  const Tensor lens_ = Tensor::of<std::int64_t>({2, 4}, {1, 2, 3, 4, 4, 3, 2, 1});
  const Tensor lens32_ = Tensor::of<std::int32_t>({2}, {1, 3});
  const Tensor short_lens_ = Tensor::of<std::int64_t>({2}, {3, 2});
  const Tensor slopes_ = Tensor::of<double>({2}, {0.5, 0.25});
  const Tensor sinks_ = Tensor::of<double>({2}, {1, -1.5});
};

TEST_F(AttendOption, each_option_reaches_the_computation) {
  const Tensor plain = attended(q_, k_, v_);
  for (const OptionCase& option : cases()) {
    const Finished finished = attend(option.flags);
    ASSERT_EQ(finished.code, 0) << option.name << ": " << finished.err;
    AttentionOptions options;
    option.set(options);
    const Tensor found = load_npy(file("out.npy"));
    EXPECT_TRUE(same_bits(found, attended(q_, k_, v_, options))) << option.name;
    EXPECT_FALSE(same_bits(found, plain)) << option.name;
  }
}

TEST_F(AttendOption, causal_without_a_value_may_stand_before_a_file) {
  ASSERT_EQ(run({"attend", "--causal", "q.npy", "k.npy", "v.npy", "-o", "out.npy"}).code, 0);
  EXPECT_TRUE(same_bits(load_npy(file("out.npy")), attended(q_, k_, v_, {.causal = Causal::square})));
}

TEST_F(AttendOption, weights_and_lse_are_the_librarys) {
  ASSERT_EQ(attend({"--weights", "w.npy", "--lse", "lse.safetensors", "--causal"}).code, 0);
  Tensor weights({2, 2, 4, 4}), lse({2, 2, 4});
  attended(q_, k_, v_, {.causal = Causal::square}, {.lse = lse, .weights = weights});
  EXPECT_TRUE(same_bits(load_npy(file("w.npy")), weights));
  const SafetensorsFile stored = load_safetensors(file("lse.safetensors"));
  ASSERT_EQ(stored.tensors.size(), 1u);
  EXPECT_TRUE(same_bits(stored.tensors.at("lse"), lse));
}

// ---- Heads in the last axis ----

// [B,S,N*D] as [B,N,S,D], copied element by element.
Tensor split(const Tensor& joined, std::int64_t heads) {
  const std::int64_t batch = joined.size(0), length = joined.size(1), dim = joined.size(2) / heads;
  Tensor result({batch, heads, length, dim});
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t s = 0; s < length; ++s) {
        for (std::int64_t d = 0; d < dim; ++d) {
          result.at<float>({b, h, s, d}) = joined.at<float>({b, s, h * dim + d});
        }
      }
    }
  }
  return result;
}

TEST_F(Attend, heads_splits_the_last_axis_and_joins_the_output) {
  const Tensor q = save_random("q.npy", {2, 5, 12}, 1);
  const Tensor k = save_random("k.npy", {2, 6, 6}, 2);
  const Tensor v = save_random("v.npy", {2, 6, 10}, 3);
  const Finished finished = attend({"--heads", "4", "--kv-heads", "2", "--weights", "w.npy", "--lse", "lse.npy"});
  ASSERT_EQ(finished.code, 0) << finished.err;
  Tensor weights({2, 4, 5, 6}), lse({2, 4, 5});
  const Tensor expected = attended(split(q, 4), split(k, 2), split(v, 2), {}, {.lse = lse, .weights = weights});
  const Tensor out = load_npy(file("out.npy"));
  ASSERT_EQ(out.sizes(), (Dims{2, 5, 20}));
  EXPECT_TRUE(same_bits(split(out, 4), expected));
  EXPECT_TRUE(same_bits(load_npy(file("w.npy")), weights));
  EXPECT_TRUE(same_bits(load_npy(file("lse.npy")), lse));
}

TEST_F(Attend, heads_of_arrays_without_a_batch_axis_leave_it_out_everywhere) {
  const Tensor x = save_random("q.npy", {4, 6}, 1);
  save_npy(file("k.npy"), x);
  save_npy(file("v.npy"), x);
  ASSERT_EQ(attend({"--heads", "2", "--valid-lens", "1,2,3,4", "--weights", "w.npy", "--lse", "lse.npy"}).code, 0);
  Tensor batched({1, 4, 6});
  copy(x, batched.view().select(0, 0));
  const Tensor heads = split(batched, 2);
  const Tensor lens = Tensor::of<std::int64_t>({1, 4}, {1, 2, 3, 4});
  const Tensor expected = attended(heads, heads, heads, {.valid_lens = lens});
  const Tensor out = load_npy(file("out.npy"));
  ASSERT_EQ(out.sizes(), (Dims{4, 6}));
  copy(out, batched.view().select(0, 0));
  EXPECT_TRUE(same_bits(split(batched, 2), expected));
  EXPECT_EQ(load_npy(file("w.npy")).sizes(), (Dims{2, 4, 4}));
  EXPECT_EQ(load_npy(file("lse.npy")).sizes(), (Dims{2, 4}));
}

TEST_F(Attend, a_width_that_the_heads_do_not_divide_is_refused_with_both_numbers) {
  for (const char* name : {"q.npy", "k.npy", "v.npy"}) {
    save_random(name, {2, 5, 10}, 1);
  }
  expect_failure(attend({"--heads", "4"}), 2, "headway attend",
                 "query has width 10, which is not divisible by --heads 4");
  expect_failure(attend({"--heads", "0"}), 2, "headway attend", "--heads: expected 1 or more, found 0");
  expect_failure(attend({"--kv-heads", "2"}), 2, "headway attend", "--kv-heads needs --heads");
}

TEST_F(Attend, a_row_with_no_key_gives_zero_and_an_lse_of_minus_infinity) {
  for (const char* name : {"q.npy", "k.npy", "v.npy"}) {
    save_random(name, {1, 2, 3}, 1);
  }
  ASSERT_EQ(attend({"--valid-lens", "0", "--lse", "lse.npy"}).code, 0);
  EXPECT_TRUE(same_bits(load_npy(file("out.npy")), Tensor({1, 2, 3})));
  EXPECT_EQ(load_npy(file("lse.npy")).at<float>({0, 1}), -std::numeric_limits<float>::infinity());
}

}  // namespace
}  // namespace headway::test
