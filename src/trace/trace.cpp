// Builds the trace of a call: inputs, projections, splitting into heads, attention, joining, output.
#include "headway/trace.h"

#include <algorithm>
#include <array>
#include <optional>

#include "core/elements.h"
#include "core/out_of_memory.h"
#include "core/plan.h"
#include "core/text.h"
#include "core/validate.h"
#include "layer/inputs.h"
#include "trace/attention_steps.h"
#include "trace/builder.h"

namespace headway {
namespace {

using tracing::Axes;
using tracing::Builder;
using tracing::Extent;
using tracing::Grid;
using tracing::Words;

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw InvalidArgument(text("trace: ", parts...));
}

void check_host(const char* name, const ConstTensorView& view) {
  if (view.device() != Device{}) {
    throw Unsupported(text("trace: ", name, " is on ", view.device(), "; a trace reads host memory only"));
  }
}

// What reading a weight's numbers relies on.
void check_numbers(const std::string& name, const ConstTensorView& view) {
  if (!is_float(view.dtype())) {
    throw TypeMismatch(text("trace: ", name, " has type ", view.dtype(), ", expected f32, f64, bf16 or f16"));
  }
  check_host(name.c_str(), view);
  if (reinterpret_cast<std::uintptr_t>(view.data()) % size_of(view.dtype()) != 0) {
    refuse(name, " must be aligned to its element's ", size_of(view.dtype()), " bytes, found address ", view.data());
  }
}

bool same_view(const ConstTensorView& a, const ConstTensorView& b) {
  return a.data() == b.data() && a.sizes() == b.sizes() && a.strides() == b.strides() && a.dtype() == b.dtype();
}

// The three inputs of a call, with the texts for each role.
struct Role {
  const char* letter;  // of W_q, b_q
  const char* argument;
  const char* symbol;
  const char* axis;  // what its rows are
  const char* meaning;
  const char* projection_why;
};

constexpr Role roles[] = {
    {"q", "query", "Q", "query", "What each position looks for.",
     "A projection turns each position into what it looks for; W_q is learnt."},
    {"k", "key", "K", "key", "What each position offers to be found by.",
     "Another projection turns each position into what it can be found by."},
    {"v", "value", "V", "key", "What each position hands over when it is found.",
     "A third one makes what it hands over, which need not resemble its key."},
};

class Tracer {
 public:
  Tracer(ConstTensorView query, ConstTensorView key, ConstTensorView value, const AttentionOptions& options,
         const TraceRequest& request)
      : given_{query, key, value}, options_(options), request_(request), builder_(make_builder()) {}

  Trace run() {
    const auto [problem, query, key, value] = joined() ? heads_from_side_by_side() : heads_as_given();
    check_names("key_tokens", request_.key_tokens, problem.key_len);
    check_names("query_tokens", request_.query_tokens, problem.query_len);
    std::size_t out = add_attention(builder_, problem, query, key, value);
    if (joined()) {
      out = join(out);
      project("o", out,
              {"output",
               "Y",
               formula_of_projection("Y", "O", "o"),
               "The last projection mixes what the heads have found.",
               TraceKind::product,
               {.head = false, .row = "query", .column = "out"}});
    }
    return finished(problem);
  }

 private:
  bool joined() const { return request_.heads != 0 || request_.kv_heads != 0 || !request_.weights.empty(); }

  // Attention's problem, and the steps that hold its queries, keys and values by head.
  struct Heads {
    Problem problem;
    std::size_t query, key, value;
  };

  Heads heads_as_given() {
    const Problem problem = inputs_problem(
        {.operation = "trace", .query = given_[0], .key = given_[1], .value = given_[2], .options = options_},
        Pass::forward);
    check_options_on_host();
    const auto add = [&](const Role& role, const ConstTensorView& view) {
      return add_given({role.argument,
                        role.symbol,
                        text(role.symbol, ", given"),
                        role.meaning,
                        TraceKind::given,
                        {.row = role.axis, .column = "dim"}},
                       view);
    };
    const std::size_t query = add(roles[0], problem.query), key = add(roles[1], problem.key);
    return {problem, query, key, add(roles[2], problem.value)};
  }

  Heads heads_from_side_by_side() {
    std::array<std::size_t, 3> steps = add_joined_inputs();
    add_given_weights();
    for (std::size_t n = 0; n < 3; ++n) {
      steps[n] = project(roles[n].letter, steps[n], words_of_projection(roles[n]));
    }
    const Problem problem = problem_of_joined(steps);
    const std::size_t query = split(roles[0], steps[0], heads_), key = split(roles[1], steps[1], kv_heads_);
    return {problem, query, key, split(roles[2], steps[2], kv_heads_)};
  }

  // ---- Checks ----

  Builder make_builder() {
    if (!joined()) {
      const int rank = given_[0].rank();
      return {rank > 2, rank > 3};
    }
    heads_ = request_.heads == 0 ? 1 : request_.heads;
    kv_heads_ = request_.kv_heads == 0 ? heads_ : request_.kv_heads;
    if (heads_ < 1 || kv_heads_ < 1) {
      refuse("expected 1 head or more, found heads ", request_.heads, ", kv_heads ", request_.kv_heads);
    }
    const int rank = given_[0].rank();
    for (std::size_t n = 0; n < 3; ++n) {
      if ((rank != 2 && rank != 3) || given_[n].rank() != rank) {
        refuse("with heads side by side ", roles[n].argument,
               " must have 3 axes [batch, length, width], or 2 without batch, all three alike, found shape ",
               given_[n].sizes());
      }
      check_numbers(roles[n].argument, given_[n]);
      if (given_[n].dtype() != given_[0].dtype()) {
        throw TypeMismatch(
            text("trace: ", roles[n].argument, " has type ", given_[n].dtype(), ", query has ", given_[0].dtype()));
      }
      given_[n] = with_batch(given_[n], rank == 3);
      if (given_[n].size(0) != given_[0].size(0)) {
        refuse(roles[n].argument, " has batch ", given_[n].size(0), ", query has ", given_[0].size(0));
      }
    }
    options_ = with_batch(options_, rank == 3);
    return {rank == 3, true};
  }

  void check_options_on_host() const {
    const std::pair<const char*, const std::optional<ConstTensorView>*> views[] = {
        {"mask", &options_.mask},
        {"bias", &options_.bias},
        {"valid_lens", &options_.valid_lens},
        {"query_lens", &options_.query_lens},
        {"spans", &options_.spans},
        {"alibi_slopes", &options_.alibi_slopes},
        {"sinks", &options_.sinks}};
    for (std::size_t n = 0; n < 3; ++n) {
      check_host(roles[n].argument, given_[n]);
    }
    for (const auto& [name, view] : views) {
      if (*view) {
        check_host(name, **view);
      }
    }
  }

  static void check_names(const char* what, const std::vector<std::string>& names, std::int64_t count) {
    if (!names.empty() && static_cast<std::int64_t>(names.size()) != count) {
      refuse(what, " has ", names.size(), " entries, expected ", count, " or none");
    }
  }

  // ---- What is given ----

  // Any view of rank 4 as a step.
  std::size_t add_given(const Words& words, const ConstTensorView& view) {
    const Extent extent{view.size(0), view.size(1), view.size(2), view.size(3)};
    builder_.check(words.name, words.axes, extent);
    Grid grid(extent);
    copy(view, TensorView(grid.numbers.data(), view.sizes()));
    return builder_.add(words, std::move(grid));
  }

  // Rows that serve as queries, keys and values at once are shown once.
  std::array<std::size_t, 3> add_joined_inputs() {
    std::array<std::size_t, 3> steps{};
    const bool one = same_view(given_[0], given_[1]) && same_view(given_[1], given_[2]);
    const bool projected = !request_.weights.empty();
    for (std::size_t n = 0; n < 3; ++n) {
      if (n > 0 && same_view(given_[n], given_[n - 1])) {
        steps[n] = steps[n - 1];
        continue;
      }
      const Axes axes{.head = false, .row = one ? "token" : roles[n].axis, .column = projected ? "in" : "dim"};
      const bool keys_and_values = n == 1 && same_view(given_[1], given_[2]);
      const std::string own = projected ? text("X_", roles[n].letter) : roles[n].symbol;
      const std::string symbol = one ? "X" : keys_and_values ? "X_kv" : own;
      input_symbols_[n] = symbol;
      const char* name = one ? "input" : keys_and_values ? "key and value" : roles[n].argument;
      steps[n] = add_given({name, symbol, symbol + ", given",
                            one ? "One row of numbers for each position." : roles[n].meaning, TraceKind::given, axes},
                           given_[n].unsqueeze(1));
    }
    for (std::size_t n = 1; n < 3; ++n) {
      if (steps[n] == steps[n - 1]) {
        input_symbols_[n] = input_symbols_[n - 1];
      }
    }
    return steps;
  }

  void add_given_weights() {
    for (const std::string letter : {"q", "k", "v", "o"}) {
      const std::string weight = "W_" + letter, bias = "b_" + letter;
      if (const ConstTensorView* view = find(weight)) {
        check_rank(weight, *view, 2, "[in, out]");
        weights_[letter] = add_given({weight,
                                      weight,
                                      weight + ", given",
                                      "The weights of a projection: each column makes one number.",
                                      TraceKind::given,
                                      {.batch = false, .head = false, .row = "in", .column = "out"}},
                                     view->unsqueeze(0).unsqueeze(0));
      }
      if (const ConstTensorView* view = find(bias)) {
        if (!find(weight)) {
          refuse(bias, " is given, but ", weight, " is not");
        }
        check_rank(bias, *view, 1, "[out]");
        biases_[letter] = add_given({bias,
                                     bias,
                                     bias + ", given",
                                     "Added to every row after the projection.",
                                     TraceKind::given,
                                     {.batch = false, .head = false, .column = "out"}},
                                    view->unsqueeze(0).unsqueeze(0).unsqueeze(0));
      }
    }
    for (const auto& entry : request_.weights) {
      static constexpr const char* known[] = {"W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o"};
      if (std::find(std::begin(known), std::end(known), entry.first) == std::end(known)) {
        refuse("expected weights called W_q, W_k, W_v, W_o, b_q, b_k, b_v or b_o, found ", entry.first);
      }
    }
  }

  const ConstTensorView* find(const std::string& name) const {
    const auto found = request_.weights.find(name);
    return found == request_.weights.end() ? nullptr : &found->second;
  }

  static void check_rank(const std::string& name, const ConstTensorView& view, int rank, const char* axes) {
    check_numbers(name, view);
    if (view.rank() != rank) {
      refuse(name, " has shape ", view.sizes(), ", expected ", axes);
    }
  }

  // ---- Projections and heads ----

  std::string formula_of_projection(const std::string& result, const std::string& input,
                                    const std::string& letter) const {
    const bool biased = request_.weights.count("b_" + letter) != 0;
    return text(result, "[i,o] = sum over e of ", input, "[i,e] * W_", letter, "[e,o]",
                biased ? text(" + b_", letter, "[o]") : "");
  }

  Words words_of_projection(const Role& role) const {
    static constexpr const char* names[] = {"projected queries", "projected keys", "projected values"};
    const auto n = static_cast<std::size_t>(&role - roles);
    return {names[n],
            role.symbol,
            formula_of_projection(role.symbol, input_symbols_[n], role.letter),
            role.projection_why,
            TraceKind::product,
            {.head = false, .row = role.axis, .column = "out"}};
  }

  // x W + b, or x where there is no such weight.
  std::size_t project(const std::string& letter, std::size_t x, const Words& words) {
    if (weights_.count(letter) == 0) {
      return x;
    }
    const Grid &in = builder_.grid(x), &weight = builder_.grid(weights_.at(letter));
    const std::int64_t inputs = weight.extent.rows, outputs = weight.extent.columns;
    if (in.extent.columns != inputs) {
      refuse("W_", letter, " has shape ", Dims{inputs, outputs}, ", expected ", in.extent.columns, " rows");
    }
    std::vector<TraceSource> sources = {{x, TracePart::row}, {weights_.at(letter), TracePart::column}};
    const Grid* bias = nullptr;
    if (biases_.count(letter) != 0) {
      bias = &builder_.grid(biases_.at(letter));
      sources.push_back({biases_.at(letter), TracePart::column_entry});
      if (bias->extent.columns != outputs) {
        refuse("b_", letter, " has shape ", Dims{bias->extent.columns}, ", expected ", Dims{outputs});
      }
    }
    const Extent extent{in.extent.batch, 1, in.extent.rows, outputs};
    builder_.check(words.name, words.axes, extent);
    Grid y = Grid::filled(extent, [&](auto b, auto, auto i, auto o) {
      double sum = bias ? (*bias)(0, 0, 0, o) : 0.0;
      for (std::int64_t e = 0; e < inputs; ++e) {
        sum += in(b, 0, i, e) * weight(0, 0, e, o);
      }
      return sum;
    });
    return builder_.add(words, std::move(y), std::move(sources));
  }

  std::int64_t width_of_head(const Role& role, std::size_t step, std::int64_t heads) const {
    const std::int64_t width = builder_.grid(step).extent.columns;
    if (width % heads != 0) {
      refuse(role.argument, " has width ", width, ", expected a multiple of its ", heads, " heads");
    }
    return width / heads;
  }

  // Attention's problem over the heads of [B,S,heads*D], which checks the options and all sizes.
  Problem problem_of_joined(const std::array<std::size_t, 3>& steps) {
    ConstTensorView views[3];
    for (std::size_t n = 0; n < 3; ++n) {
      const Grid& grid = builder_.grid(steps[n]);
      const std::int64_t heads = n == 0 ? heads_ : kv_heads_, width = width_of_head(roles[n], steps[n], heads);
      views[n] =
          ConstTensorView(grid.numbers.data(), {grid.extent.batch, grid.extent.rows, heads, width}).transpose(1, 2);
    }
    Problem problem = inputs_problem(
        {.operation = "trace", .query = views[0], .key = views[1], .value = views[2], .options = options_},
        Pass::forward);
    check_options_on_host();
    return problem;
  }

  std::size_t split(const Role& role, std::size_t step, std::int64_t heads) {
    static constexpr const char* names[] = {"queries by head", "keys by head", "values by head"};
    const Grid& side_by_side = builder_.grid(step);
    const std::int64_t width = width_of_head(role, step, heads);
    const char* row = role.axis[0] == 'q' ? "i" : "j";
    const std::string from =
        weights_.count(role.letter) ? role.symbol : input_symbols_[static_cast<std::size_t>(&role - roles)];
    Grid by_head = Grid::filled({side_by_side.extent.batch, heads, side_by_side.extent.rows, width},
                                [&](auto b, auto h, auto i, auto d) { return side_by_side(b, 0, i, h * width + d); });
    return builder_.add({names[&role - roles],
                         role.symbol,
                         text(role.symbol, "[h,", row, ",d] = ", from, "[", row, ",", width, " h + d]"),
                         "Each head takes columns of its own and works alone; nothing is computed.",
                         TraceKind::regrouped,
                         {.row = role.axis, .column = "dim"}},
                        std::move(by_head), {{step, TracePart::split}});
  }

  std::size_t join(std::size_t step) {
    const Grid& by_head = builder_.grid(step);
    const std::int64_t width = by_head.extent.columns;
    const Extent extent{by_head.extent.batch, 1, by_head.extent.rows, by_head.extent.heads * width};
    const Words words{"joined heads",
                      "O",
                      text("O[i,", width, " h + d] = O[h,i,d]"),
                      "The heads' outputs side by side again, as wide as they were before.",
                      TraceKind::regrouped,
                      {.head = false, .row = "query", .column = "dim"}};
    builder_.check(words.name, words.axes, extent);
    Grid joined =
        Grid::filled(extent, [&](auto b, auto, auto i, auto c) { return by_head(b, c / width, i, c % width); });
    return builder_.add(words, std::move(joined), {{step, TracePart::join}});
  }

  // ---- The result ----

  Trace finished(const Problem& problem) {
    Trace trace;
    trace.title = request_.title;
    Plan plan;
    describe_problem(problem, plan);
    trace.options = plan.options;
    trace.key_tokens = request_.key_tokens;
    trace.query_tokens = request_.query_tokens.empty() && problem.query_len == problem.key_len ? request_.key_tokens
                                                                                               : request_.query_tokens;
    trace.steps = builder_.finish();
    return trace;
  }

  std::array<ConstTensorView, 3> given_;
  AttentionOptions options_;
  const TraceRequest& request_;
  std::int64_t heads_ = 0, kv_heads_ = 0;
  Builder builder_;
  std::array<std::string, 3> input_symbols_;
  std::map<std::string, std::size_t> weights_, biases_;  // steps, by letter
};

}  // namespace

Trace trace(ConstTensorView query, ConstTensorView key, ConstTensorView value, const AttentionOptions& options,
            const TraceRequest& request) try {
  return Tracer(query, key, value, options, request).run();
} catch (...) {
  throw_own_error("trace");
}

Trace trace(const MultiHeadAttention& layer, ConstTensorView queries, ConstTensorView keys, ConstTensorView values,
            const AttentionOptions& options, TraceRequest request) try {
  checked_inputs("trace", layer, queries, keys, values);
  request.heads = layer.config().heads;
  request.kv_heads = layer.config().kv_heads;
  for (const auto& [name, parameter] : layer.parameters()) {
    request.weights.insert_or_assign(name, parameter);
  }
  return trace(queries, keys, values, options, request);
} catch (...) {
  throw_own_error("trace");
}

const TraceStep& Trace::step(const std::string& name) const {
  std::string names;
  for (const TraceStep& step : steps) {
    if (step.name == name) {
      return step;
    }
    names += (names.empty() ? "" : ", ") + step.name;
  }
  throw InvalidArgument(text("Trace::step: expected one of ", names, ", found ", name));
}

const char* name(TracePart part) {
  switch (part) {
    case TracePart::cell: return "cell";
    case TracePart::row: return "row";
    case TracePart::column: return "column";
    case TracePart::other_row: return "other_row";
    case TracePart::row_entry: return "row_entry";
    case TracePart::column_entry: return "column_entry";
    case TracePart::split: return "split";
    case TracePart::join: return "join";
  }
  return "";
}

const char* name(TraceKind kind) {
  switch (kind) {
    case TraceKind::given: return "given";
    case TraceKind::product: return "product";
    case TraceKind::regrouped: return "regrouped";
    case TraceKind::elementwise: return "elementwise";
    case TraceKind::allowed: return "allowed";
    case TraceKind::reduced: return "reduced";
  }
  return "";
}

}  // namespace headway
