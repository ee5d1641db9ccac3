// One hard case as plain data: sizes, layouts, options and the kinds of numbers that its tensors hold. A case is one
// line of text, `type=bf16 sq=65 sk=129 mask=tiles ...`, that names what differs from the default case and can be
// replayed.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "headway/attention.h"
#include "headway/cache.h"
#include "support/strided.h"

namespace headway::test::fuzz {

enum class Subject : std::uint8_t { attention, layer, cache };
enum class Form : std::uint8_t { bhsd, bsd, sd, packed };
// Which of q, k and v are views of one buffer: slices of [B,S,H+2Hkv,D]; one tensor as keys and values; one as all
// three; values that are the first columns of the keys (multi-head latent attention).
enum class Sharing : std::uint8_t { none, qkv, kv, all, columns };
// Where a mask is true, or a bias is not -inf.
enum class Pattern : std::uint8_t { none, full, random, sparse, rows, columns, tiles, one_key, empty };
// What spans leave open: ranges at random; what people ask for; and what is legal but awkward: empty, overlapping,
// unsorted and single keys.
enum class Spans : std::uint8_t { none, random, prefix, first, documents, blocks, hostile };
enum class Lengths : std::uint8_t { none, item, item32, row, row32 };
enum class Numbers : std::uint8_t {
  normal,
  constant,
  equal,     // every row the same
  channel,   // one channel a thousand times the others
  integers,  // -2 to 2: many scores tie
  apart,     // some rows 64 times the others
  wide,      // over 30 powers of two
  signed_zeros,
  denormal,
};
// Rotary embeddings of a cache: of whole rows, of a part of them, with each scaling that a cache takes.
enum class Rope : std::uint8_t { none, whole, interleaved, partial, linear, yarn, llama3 };
enum class FloatType : std::uint8_t { none, f32, f64, bf16, f16 };

// Single elements that hold something else.
enum class Place : std::uint8_t {
  query,
  hidden_key,
  hidden_value,
  key,
  value,
  hidden_bias,
  bias,
  grad,
  hidden_grad,
  sink,
};
enum class Odd : std::uint8_t { nan, inf, minus_inf, tiny, large };
struct Plant {
  Place place;
  Odd odd;
  bool operator==(const Plant&) const = default;
};

struct Case {
  Subject subject = Subject::attention;
  DType type = DType::f32;
  Form form = Form::bhsd;
  std::int64_t b = 1, h = 1, hkv = 1, sq = 1, sk = 1, d = 1, dv = 1;
  Layout q_layout = Layout::contiguous, k_layout = Layout::contiguous, v_layout = Layout::contiguous;
  Layout out_layout = Layout::contiguous, grad_layout = Layout::contiguous, option_layout = Layout::contiguous;
  Sharing sharing = Sharing::none;

  Pattern mask = Pattern::none;
  std::string mask_axes = "bhij";  // the others have size 1
  Pattern bias = Pattern::none;
  std::string bias_axes = "bhij";
  DType bias_type = DType::f32;
  double bias_size = 1;
  bool trimmed = false;   // masks and biases lack the leading axes that they repeat along
  bool expanded = false;  // they have every axis in full size, with stride 0 where they repeat

  Causal causal = Causal::none;
  Spans spans = Spans::none;
  std::string span_axes = "bh";  // the others have size 1
  std::int64_t span_count = 2;   // R
  std::int64_t span_rows = 1;
  bool narrow_spans = false;           // i32
  std::int64_t left = -1, right = -1;  // of the window; -1 is unlimited
  Lengths valid = Lengths::none;
  Lengths queries = Lengths::none;                          // item or item32
  double scale = std::numeric_limits<double>::quiet_NaN();  // NaN: not given
  double softcap = 0;                                       // 0: not given
  FloatType alibi = FloatType::none;
  double alibi_size = 0.2;
  FloatType sinks = FloatType::none;
  double sinks_size = 1;
  double dropout = 0;

  Numbers q = Numbers::normal, k = Numbers::normal, v = Numbers::normal, grad = Numbers::normal;
  double q_size = 1, k_size = 1, v_size = 1, grad_size = 1;
  std::vector<Plant> plants;
  std::uint64_t seed = 1;  // of the numbers

  // A layer's: model_dim, widths of keys and values, whether it has biases.
  std::int64_t model = 1, key_dim = 1, value_dim = 1;
  bool biased = false;

  // A cache's, whose window is the case's.
  std::int64_t page = 16, first = 0, slack = 0;
  CacheFormat stored = CacheFormat::plain;
  Rope rope = Rope::none;

  bool operator==(const Case&) const;
};

std::string line_of(const Case& one);
// Throws std::invalid_argument with the word that is not understood.
Case case_of(const std::string& line);

// The nearest legal case: options that contradict the form, sizes or sharing are changed to what goes with them.
Case legal(Case one);

// Whether no allowed pair reads such a place; whether one element in memory may be several of a tensor, or of several.
bool is_hidden(Place place);
bool shares_elements(const Case& one);

// Multiplications of one forward: what the oracle's time grows with.
double cost(const Case& one);

// The next case of a stream of random numbers; always legal.
Case draw(Random& random);

// Cases a little simpler than this one, the simplest first; each legal and different from it.
std::vector<Case> simpler(const Case& one);

}  // namespace headway::test::fuzz
