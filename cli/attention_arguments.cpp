// The options of attention as flags.
#include "attention_arguments.h"

#include "arguments.h"

namespace headway::cli {
namespace {

constexpr const char* group = "Attention";
constexpr const char* numbers_or_file = "N,N,...|FILE";

std::optional<std::int64_t> window_side(const std::string& found) {
  if (found == "none") {
    return std::nullopt;
  }
  const auto width = parse_number<std::int64_t>(found);
  if (width < 0) {
    throw UsageError(text("expected sides of 0 or more, or none for unlimited, found ", found));
  }
  return width;
}

// An option that takes a file or numbers: kept as text until files are read, but malformed numbers are reported at
// once.
template <class Number>
void add_list(CLI::App& app, const std::string& name, std::optional<std::string>& target, const std::string& help) {
  add_parsed(app, name, numbers_or_file, help, [&target](const std::string& found) {
    if (!parse_tensor_name(found)) {
      parse_numbers<Number>(found);
    }
    target = found;
  }).group(group);
}

void add_file(CLI::App& app, const std::string& name, std::optional<std::string>& target, const std::string& help) {
  add_text(app, name, target, help).group(group);
}

}  // namespace

Window parse_window(const std::string& found) {
  const std::vector<std::string> sides = split_at_commas(found);
  if (sides.size() != 2) {
    throw UsageError(text("expected two sides, as in 128,0 or none,16, found ", found));
  }
  return {window_side(sides[0]), window_side(sides[1])};
}

void AttentionArguments::add_to(CLI::App& app) {
  add_choice<Causal>(
      app, "--causal", scalars_.causal,
      {{"square", Causal::square}, {"top_left", Causal::top_left}, {"bottom_right", Causal::bottom_right}},
      "A query sees no later key. Without a value: square, for as many queries as keys")
      .type_name("[square|top_left|bottom_right]")
      .group(group);
  add_parsed(app, "--window", "LEFT,RIGHT", "Keys that a query sees on each side of its position: numbers, or none",
             [this](const std::string& found) { scalars_.window = parse_window(found); })
      .group(group);
  add_list<std::int64_t>(app, "--valid-lens", valid_lens_, "Number of real keys, for each batch item or each query");
  add_list<std::int64_t>(app, "--query-lens", query_lens_, "Number of real queries, for each batch item");
  add_file(app, "--mask", mask_, "Bool array that broadcasts to (B,H,Sq,Sk): true = attend");
  add_file(app, "--mask-file", mask_file_,
           "Integers (B,H,Sq,R,2): the spans [begin, end) of keys that each query sees; or bools, as --mask");
  add_number<std::int64_t>(app, "--span-rows", scalars_.span_rows,
                           "Consecutive queries that share an entry of the spans [1]")
      .group(group);
  add_file(app, "--bias", bias_, "Float array that broadcasts to (B,H,Sq,Sk), added to the scores");
  add_number<double>(app, "--scale", scalars_.scale, "Factor of the scores [1/sqrt(D)]").group(group);
  add_number<double>(app, "--softcap", scalars_.softcap, "Scores become softcap * tanh(score / softcap)").group(group);
  add_list<double>(app, "--alibi-slopes", alibi_slopes_, "A slope for each head: adds -slope * distance");
  add_list<double>(app, "--sinks", sinks_, "One more score for each head, without a value");
  add_number<double>(app, "--dropout", scalars_.dropout, "Probability to drop a weight; needs --seed").group(group);
  add_number<std::uint64_t>(app, "--seed", scalars_.seed, "Seed of the dropout").group(group);
  Choices<Engine> engines;
  for (const Engine engine : {Engine::automatic, Engine::reference, Engine::cpu, Engine::cuda}) {
    engines.emplace_back(name(engine), engine);
  }
  add_choice(app, "--engine", scalars_.engine, engines, "The engine to use [automatic: the fastest that can]")
      .group(group);
}

std::vector<std::string> AttentionArguments::texts() const {
  std::vector<std::string> result;
  for (const auto* given : {&mask_, &mask_file_, &bias_, &valid_lens_, &query_lens_, &alibi_slopes_, &sinks_}) {
    if (*given) {
      result.push_back(**given);
    }
  }
  return result;
}

void AttentionArguments::place_mask_file(const ReadArray& read, AttentionOptions& result) const {
  if (!mask_file_) {
    return;
  }
  const ConstTensorView found = read(*mask_file_);
  if (is_integer(found.dtype())) {
    result.spans = found;
    return;
  }
  if (result.mask) {
    throw UsageError("expected one bool mask, found --mask and --mask-file");
  }
  result.mask = found;
}

AttentionOptions AttentionArguments::options(TensorInputs& inputs, const ReadArray& read_matrix) const {
  AttentionOptions result = scalars_;
  const auto place = [](const std::optional<std::string>& given, std::optional<ConstTensorView>& view,
                        const ReadArray& read) {
    if (given) {
      view = read(*given);
    }
  };
  const ReadArray whole = [&](const std::string& name) { return inputs.load(name); };
  const ReadArray integers = [&](const std::string& name) { return inputs.integers(name); };
  const ReadArray floats = [&](const std::string& name) { return inputs.floats(name); };
  const ReadArray& matrix = read_matrix ? read_matrix : whole;
  place(mask_, result.mask, matrix);
  place_mask_file(matrix, result);
  place(bias_, result.bias, matrix);
  place(valid_lens_, result.valid_lens, integers);
  place(query_lens_, result.query_lens, integers);
  place(alibi_slopes_, result.alibi_slopes, floats);
  place(sinks_, result.sinks, floats);
  return result;
}

AttentionOptions with_batch_axis(AttentionOptions options) {
  auto& lens = options.valid_lens;
  if (lens && lens->rank() < 2 && lens->sizes() != Dims{1}) {
    lens = lens->unsqueeze(0);
  }
  return options;
}

std::vector<std::string> with_causal_spelled_out(const std::vector<std::string>& arguments) {
  std::vector<std::string> result;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == "--") {
      result.insert(result.end(), arguments.begin() + static_cast<std::ptrdiff_t>(i), arguments.end());
      break;
    }
    if (arguments[i] != "--causal") {
      result.push_back(arguments[i]);
      continue;
    }
    const std::string next = i + 1 < arguments.size() ? arguments[i + 1] : "";
    // Every file name has an extension, and no alignment has a dot.
    const bool has_value = !next.empty() && next[0] != '-' && next.find('.') == std::string::npos;
    result.push_back("--causal=" + (has_value ? next : "square"));
    i += has_value ? 1 : 0;
  }
  return result;
}

}  // namespace headway::cli
