// Memory refused at each allocation of an operation in turn, on any thread, once or from then on: the operation ends
// with OutOfMemory or, where it can do without, with the right bits; nothing leaks; the next call is right.
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "refusals.h"
#include "support.h"

namespace headway::test {
namespace {

// `run` calls the library alone; `result` is what it gave.
struct Operation {
  const char* name;
  std::function<void()> run;
  std::function<std::string()> result;
};

enum class Ending { right, out_of_memory, wrong, another_error };

// Runs the operation with allocation `nth` refused, and tells whether it came to that.
Ending ending_of(const Operation& operation, const std::string& expected, long nth, HowOften how_often,
                 bool& happened) {
  {
    const Refusal refusal(Refused::memory, nth, how_often);
    try {
      operation.run();
      happened = refusal.happened();
    } catch (const OutOfMemory&) {
      happened = refusal.happened();
      return happened ? Ending::out_of_memory : Ending::another_error;
    } catch (...) {
      return Ending::another_error;
    }
  }
  return operation.result() == expected ? Ending::right : Ending::wrong;
}

// All of the first few hundred allocations, then some.
long after(long nth) { return nth < 150 ? nth + 1 : nth + nth / 8; }

void refuse_each(const Operation& operation) {
  operation.run();
  operation.run();  // what is kept from call to call is there now
  const std::string expected = operation.result();
  for (const HowOften how_often : {HowOften::once, HowOften::from_then_on}) {
    long nth = 0, refused = 0;
    for (bool happened = true; happened; nth = after(nth)) {
      const long before = live_blocks();
      const Ending ending = ending_of(operation, expected, nth, how_often, happened);
      ASSERT_TRUE(ending == Ending::right || ending == Ending::out_of_memory)
          << operation.name << ", allocation " << nth << ": "
          << (ending == Ending::wrong ? "other bits" : "an error that is not OutOfMemory");
      refused += ending == Ending::out_of_memory;
      operation.run();
      ASSERT_EQ(operation.result(), expected) << operation.name << ", the call after allocation " << nth;
      ASSERT_EQ(live_blocks(), before) << operation.name << " leaks when allocation " << nth << " is refused";
    }
    EXPECT_GT(refused, 0) << operation.name << ": no allocation was refused";
  }
}

class RefusedMemory : public testing::Test {
 protected:
  const ThreadCount three_{3};
};

// Inputs and outputs of one attention call and its backward.
struct Attention {
  Tensor q, k, out, lse, dq, dk, dv;
  AttentionOptions options;

  Attention(const Dims& query, const Dims& key, DType dtype = DType::f32)
      : q(numbers(query, dtype)),
        k(numbers(key, dtype, 2)),
        out(query, dtype),
        lse({query[0], query[1], query[2]}),
        dq(query, dtype),
        dk(key, dtype),
        dv(key, dtype) {}

  void forward() { attention(q, k, k, out, options, {.lse = lse}); }
  void backward() { attention_backward(q, q, k, k, out, lse, {.dq = dq, .dk = dk, .dv = dv}, options); }

  void refuse(const char* name) {
    refuse_each({name, [&] { forward(); }, [&] { return bytes_of(out) + bytes_of(lse); }});
    refuse_each({name, [&] { backward(); }, [&] { return bytes_of(dq) + bytes_of(dk) + bytes_of(dv); }});
  }
};

TEST_F(RefusedMemory, in_attention_and_its_backward_is_out_of_memory) {
  Attention({1, 2, 300, 32}, {1, 1, 300, 32}).refuse("long f32");
  Attention({1, 2, 300, 32}, {1, 2, 300, 32}, DType::bf16).refuse("long bf16");
  Attention({4, 2, 16, 8}, {4, 2, 16, 8}).refuse("short");
  Attention({1, 4, 1, 32}, {1, 2, 3000, 32}).refuse("decode");
  Attention({1, 4, 2, 32}, {1, 4, 3000, 32}, DType::bf16).refuse("decode bf16");
  Attention reference({1, 2, 6, 8}, {1, 2, 7, 8});
  reference.options.engine = Engine::reference;
  reference.refuse("reference");
}

TEST_F(RefusedMemory, with_every_option_is_out_of_memory) {
  const Tensor bias = numbers({1, 1, 100, 120}), sinks = numbers({2});
  Tensor dbias(bias.sizes()), dsinks({2}), weights({2, 2, 100, 120});
  Attention call({2, 2, 100, 32}, {2, 2, 120, 32});
  call.options = {.bias = bias, .causal = Causal::bottom_right, .sinks = sinks, .dropout = 0.2, .seed = 9};
  refuse_each({"options",
               [&] {
                 attention(call.q, call.k, call.k, call.out, call.options, {call.lse, weights});
               },
               [&] { return bytes_of(call.out) + bytes_of(weights); }});
  refuse_each({"options, backward",
               [&] {
                 attention_backward(call.q, call.q, call.k, call.k, call.out, call.lse,
                                    {.dq = call.dq, .dk = call.dk, .dv = call.dv, .dbias = dbias, .dsinks = dsinks},
                                    call.options);
               },
               [&] { return bytes_of(call.dq) + bytes_of(dbias) + bytes_of(dsinks); }});
  refuse_each({"scores",
               [&] { attention_scores(call.q, call.k, weights, Stage::biased, {.causal = Causal::top_left}); },
               [&] { return bytes_of(weights); }});
  Plan plan;
  refuse_each({"explain", [&] { plan = explain(call.q, call.k, call.k, call.options); }, [&] { return plan.options; }});
}

TEST_F(RefusedMemory, in_packed_sequences_is_out_of_memory) {
  const Tensor q = numbers({200, 2, 16}), starts = Tensor::of<std::int32_t>({5}, {0, 1, 1, 80, 200});
  Tensor out(q.sizes()), lse({2, 200}), dq(q.sizes()), dk(q.sizes()), dv(q.sizes());
  refuse_each({"varlen", [&] { attention_varlen(q, q, q, starts, starts, out, {}, {.lse = lse}); },
               [&] { return bytes_of(out) + bytes_of(lse); }});
  refuse_each({"varlen backward",
               [&] { attention_varlen_backward(q, q, q, q, out, lse, starts, starts, {.dq = dq, .dk = dk, .dv = dv}); },
               [&] { return bytes_of(dq) + bytes_of(dk) + bytes_of(dv); }});
}

TEST_F(RefusedMemory, in_a_cache_is_out_of_memory_and_the_cache_is_as_it_was) {
  for (const CacheFormat format : {CacheFormat::plain, CacheFormat::int8}) {
    KVCache cache(
        {.pages = 40, .page_size = 4, .kv_heads = 2, .head_dim = 16, .quantize = format, .rope = RopeConfig{}});
    const Tensor key = numbers({1, 2, 30, 16}), value = numbers({1, 2, 30, 16}, DType::f32, 2);
    const Tensor query = numbers({1, 4, 30, 16}, DType::f32, 3);
    const std::int64_t id = cache.add();
    cache.append(id, {.key = key, .value = value});
    const std::string before = bytes_of(cache.read(id, 0, 30).first);
    Tensor out(query.sizes());
    const auto run = [&] {
      const std::int64_t other = cache.fork(id);
      try {
        try {
          cache.append(other, {.key = key, .value = value});  // copies a page
        } catch (const OutOfMemory&) {
          EXPECT_EQ(cache.length(other), 30);
          throw;
        }
        cache.attend(other, query, out);
      } catch (const OutOfMemory&) {
        cache.remove(other);
        throw;
      }
      cache.remove(other);
    };
    refuse_each({"cache", run, [&] { return bytes_of(out); }});
    EXPECT_EQ(bytes_of(cache.read(id, 0, 30).first), before);
    EXPECT_EQ(cache.free_pages(), 40 - 8);
    Tensor turned;
    const Tensor positions = Tensor::of<std::int64_t>({2}, {3, 4});
    refuse_each(
        {"rope", [&] { turned = rope(query.view().slice(2, 0, 2), positions); }, [&] { return bytes_of(turned); }});
  }
}

TEST_F(RefusedMemory, in_a_layer_is_out_of_memory) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Tensor x = numbers({2, 70, 32}, dtype);
    MultiHeadAttention layer({.model_dim = 32, .heads = 2, .bias = true, .dtype = dtype});
    Tensor y;
    Gradients gradients;
    refuse_each({"infer", [&] { y = layer.infer(x, x, x); }, [&] { return bytes_of(y); }});
    refuse_each({"forward and backward",
                 [&] {
                   y = layer.forward(x, x, x);
                   gradients = layer.backward(x);
                 },
                 [&] {
                   return bytes_of(y) + bytes_of(gradients.queries) + bytes_of(gradients.parameters.at("W_k")) +
                          bytes_of(gradients.parameters.at("b_o"));
                 }});
  }
  std::optional<MultiHeadAttention> made;
  refuse_each({"construction", [&] { made.emplace(MultiHeadAttention({.model_dim = 16, .heads = 2})); },
               [&] {
                 const Tensor weight = copied_to(std::as_const(*made).parameter("W_q"), Device{});
                 return bytes_of(weight);
               }});
  std::size_t names = 0;
  refuse_each({"parameters", [&] { names = made->parameters().size() + std::as_const(*made).parameters().size(); },
               [&] { return std::to_string(names); }});
}

TEST_F(RefusedMemory, in_the_text_of_a_plan_is_out_of_memory) {
  const Tensor x = numbers({1, 2, 70, 32}, DType::f32);
  const Plan plan = explain(x, x, x);
  std::string text;
  refuse_each({"to_string", [&] { text = to_string(plan); }, [&] { return text; }});
}

TEST_F(RefusedMemory, in_an_analysis_is_out_of_memory) {
  const Tensor q = numbers({1, 2, 90, 16});
  Tensor out(q.sizes()), lse({1, 2, 90}), mean({1, 90, 90}), weights;
  attention(q, q, q, out, {}, {.lse = lse});
  Analysis analysis;
  TileMap map;
  refuse_each({"analyze", [&] { analysis = analyze(q, q, {.causal = Causal::square}, {.top = 3, .cells = 8}); },
               [&] { return bytes_of(analysis.entropy) + bytes_of(analysis.top_keys); }});
  refuse_each({"weights_in", [&] { weights = weights_in(q, q, {3, 60, 2, 80}); }, [&] { return bytes_of(weights); }});
  refuse_each({"mean_weights", [&] { mean_weights(q, q, lse, mean); }, [&] { return bytes_of(mean); }});
  refuse_each({"tile_map",
               [&] {
                 map = tile_map(q, q, lse, 0, 1, {0, 90, 0, 90}, 9, 9);
               },
               [&] { return bytes_of(map.mean) + bytes_of(map.max); }});
}

TEST_F(RefusedMemory, in_a_trace_is_out_of_memory) {
  const Tensor q = numbers({1, 2, 3, 4});
  const TraceRequest request;
  std::string shown, page;
  refuse_each({"trace",
               [&] {
                 const Trace steps = trace(q, q, q, {.causal = Causal::square}, request);
                 shown = to_string(steps);
                 page = trace_page(steps);
               },
               [&] { return shown + std::to_string(page.size()); }});
}

// A file that is not saved is not there, nor is a part of it; one that is saved can be loaded.
TEST_F(RefusedMemory, in_saving_and_loading_is_out_of_memory_and_leaves_no_file_behind) {
  const Folder folder;
  const Tensor tensor = numbers({40, 50});
  const auto npy = folder / "a.npy";
  Tensor loaded;
  refuse_each({"save_npy", [&] { save_npy(npy, tensor, {.overwrite = true}); },
               [&] {
                 EXPECT_EQ(folder.files(), 1);
                 return bytes_of(load_npy(npy));
               }});
  refuse_each({"load_npy", [&] { loaded = load_npy(npy); }, [&] { return bytes_of(loaded); }});
  const auto npz = folder / "a.npz";
  NamedTensors named;
  const NamedViews views{{"x", tensor}, {"y", tensor}};
  refuse_each({"save_npz", [&] { save_npz(npz, views, {.overwrite = true, .compress = true}); },
               [&] {
                 EXPECT_EQ(folder.files(), 2);
                 return bytes_of(load_npz(npz).at("y"));
               }});
  refuse_each({"load_npz", [&] { named = load_npz(npz); }, [&] { return bytes_of(named.at("x")); }});
  const auto path = folder / "layer.safetensors";
  const long others = folder.files();
  std::optional<MultiHeadAttention> layer(MultiHeadAttention({.model_dim = 16, .heads = 2}));
  const auto weights = [&] { return bytes_of(copied_to(std::as_const(*layer).parameter("W_o"), Device{})); };
  refuse_each({"MultiHeadAttention::save", [&] { layer->save(path, true); },
               [&] {
                 EXPECT_EQ(folder.files(), others + 1);
                 layer.emplace(MultiHeadAttention::load(path));
                 return weights();
               }});
  refuse_each({"MultiHeadAttention::load", [&] { layer.emplace(MultiHeadAttention::load(path)); }, weights});
}

}  // namespace
}  // namespace headway::test
