// Attention step by step, with every number: for small inputs, to read, to check by hand and to learn from. As text,
// and as a page to step through.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iosfwd>
#include <map>
#include <string>
#include <vector>

#include "headway/attention.h"
#include "headway/cxx20.h"
#include "headway/layer.h"
#include "headway/tensor.h"

#pragma GCC visibility push(default)
namespace headway {

// Which numbers of another step one number of a step, in row i and column j, is computed from.
enum class TracePart : std::uint8_t {
  cell,          // (i, j)
  row,           // row i
  column,        // column j
  other_row,     // row j: a key, for the score of query i and key j
  row_entry,     // entry i of a step with one number per row
  column_entry,  // entry j of a step with one number per column
  split,         // (i, h * width + j) of the heads side by side
  join,          // (i, j % width) of head j / width
};

const char* name(TracePart part);

struct TraceSource {
  std::size_t step = 0;  // counted from 0
  TracePart part = TracePart::cell;
};

enum class TraceKind : std::uint8_t {
  given,        // an input, a weight, a mask
  product,      // sums of products, plus a bias
  regrouped,    // the same numbers, split into heads or joined
  elementwise,  // each number from those at the same place
  allowed,      // 1 where a key may be seen, 0 elsewhere
  reduced,      // one number per row
};

const char* name(TraceKind kind);

struct TraceStep {
  std::string name;     // "scaled scores"
  std::string symbol;   // "S"
  std::string formula;  // "S[i,j] = 0.5 * S[i,j]"
  std::string why;      // one sentence
  TraceKind kind = TraceKind::given;
  // What each axis of the numbers counts: "batch", "head", "query", "key", "token" (where queries and keys are the same
  // rows), "dim", and "in", "out" for the weights of a projection.
  std::vector<std::string> axes;
  Tensor numbers;                         // f64
  std::vector<TraceSource> sources = {};  // empty for inputs
};

struct Trace {
  std::string title;
  std::string options;  // as explain() writes them
  std::vector<std::string> query_tokens, key_tokens;
  std::vector<TraceStep> steps;  // the inputs first, the result last

  const Tensor& result() const { return steps.back().numbers; }
  const TraceStep& step(const std::string& name) const;  // InvalidArgument if there is no such step
};

struct TraceRequest {
  // Set if the heads are side by side: query is [B,Sq,heads*D], key and value [B,Sk,kv_heads*D], all with or without B.
  // The trace then shows how they are split and joined. heads 0: arrays as attention takes them; kv_heads 0: as many as
  // heads.
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  // Any of W_q, W_k, W_v, W_o [in,out] and b_q, b_k, b_v, b_o [out], in any float type. Query, key and value are then
  // the inputs of the projections; heads 0 means 1.
  std::map<std::string, ConstTensorView> weights = {};
  std::string title = "Attention, step by step";
  std::vector<std::string> key_tokens = {};    // one per key, shown instead of positions
  std::vector<std::string> query_tokens = {};  // one per query; by default the keys', if there are as many
};

// Steps with more numbers are refused.
inline constexpr std::int64_t trace_limit = 16384;

// Computes attention by its definition, in float64, and keeps every number. The options are attention's; `engine` is
// ignored. The result agrees with attention's within its error bounds.
Trace trace(ConstTensorView query, ConstTensorView key, ConstTensorView value, const AttentionOptions& options = {},
            const TraceRequest& request = {});

// The same for a layer; heads and weights are the layer's.
Trace trace(const MultiHeadAttention& layer, ConstTensorView queries, ConstTensorView keys, ConstTensorView values,
            const AttentionOptions& options = {}, TraceRequest request = {});

struct TraceText {
  bool colour = false;  // with terminal escape sequences
  int width = 100;      // columns; heads are printed side by side if they fit
};

// Every step with its formula, its shape and its numbers; long axes are shortened.
std::string to_string(const Trace& trace, const TraceText& form = {});
// One step of it, counted from 0.
std::string to_string(const Trace& trace, std::size_t step, const TraceText& form = {});
std::ostream& operator<<(std::ostream& stream, const Trace& trace);

// A page to step through, in one self-contained HTML file. Tokens are data: whatever they contain is shown, never
// executed. An existing file is an error unless overwrite is set.
std::string trace_page(const Trace& trace);
void write_trace(const std::filesystem::path& path, const Trace& trace, bool overwrite = false);

}  // namespace headway
#pragma GCC visibility pop
