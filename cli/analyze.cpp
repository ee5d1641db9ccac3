// headway analyze: what attention does with queries and keys, head by head.
#include <algorithm>
#include <iomanip>
#include <iostream>

#include "arguments.h"
#include "attention_call.h"
#include "command.h"
#include "headway/headway.h"
#include "interrupt.h"
#include "json.h"
#include "output_files.h"
#include "progress_line.h"
#include "text.h"

namespace headway::cli {
namespace {

constexpr const char* analyze_examples = R"(Examples:
  headway analyze q.npy k.npy --causal
  headway analyze x.npy x.npy --heads 8 --near 128,0 -o statistics.npz
  headway analyze q.npy k.npy --json

The table, or with --json a list of heads, shows means over the rows of each head. With -o every statistic is written, under these names:
  entropy, distance, first, diagonal, near, lse  (B,H,Sq)
  received  (B,H,Sk)    top_keys, top_weights  (B,H,Sq,top)
  map_mean, map_max  (B,H,R,C)    similarity  (B,H,H))";

std::string table(const Analysis& found) {
  std::ostringstream lines;
  lines << "batch  head  entropy    distance  first  diagonal   near\n" << std::fixed;
  for (std::int64_t b = 0; b < found.lse.size(0); ++b) {
    for (std::int64_t h = 0; h < found.lse.size(1); ++h) {
      const auto mean = [&](const Tensor& rows) { return mean_over_rows(rows, b, h); };
      lines << std::setw(5) << b << std::setw(6) << h << std::setprecision(3) << std::setw(9) << mean(found.entropy)
            << std::setprecision(1) << std::setw(12) << mean(found.distance) << std::setprecision(3) << std::setw(7)
            << mean(found.first) << std::setw(10) << mean(found.diagonal) << std::setw(7) << mean(found.near) << "\n";
    }
  }
  return std::move(lines).str();
}

// A list with an object for each head.
std::string json_of(const Analysis& found) {
  std::string heads;
  for (std::int64_t b = 0; b < found.lse.size(0); ++b) {
    for (std::int64_t h = 0; h < found.lse.size(1); ++h) {
      const auto mean = [&](const char* name, const Tensor& rows) {
        return text(json(std::string_view(name)), ": ", json(mean_over_rows(rows, b, h)));
      };
      heads += text(heads.empty() ? "" : ",\n", "  ",
                    json_members({text("\"batch\": ", b), text("\"head\": ", h), mean("entropy", found.entropy),
                                  mean("distance", found.distance), mean("first", found.first),
                                  mean("diagonal", found.diagonal), mean("near", found.near)}));
    }
  }
  return text("[\n", heads, "\n]\n");
}

class Analyze final : public Command {
 public:
  explicit Analyze(CLI::App& app) {
    CLI::App& command =
        add_command(app, "analyze", "Statistics of the attention of queries and keys, for each head", analyze_examples);
    arguments_.add_files_to(command, true, Values::absent);
    add_text(command, "-o,--output", output_, "A .npz or .safetensors file for all statistics").group("Outputs");
    add_flag(command, "--force", force_, "Replace an existing file").group("Outputs");
    add_flag(command, "--json", as_json_, "As JSON, for programs");
    add_number<std::int64_t>(command, "--top", request_.top, "Number of strongest keys to list for each row [8]");
    add_parsed(command, "--near", "LEFT,RIGHT", "The window around the diagonal whose weights are summed [64,64]",
               [this](const std::string& found) { request_.near = parse_window(found); });
    add_number<std::int64_t>(command, "--cells", request_.cells,
                             "Cells along each side of the maps, at most 512 [256]");
    arguments_.add_options_to(command);
  }

  void run() override {
    if (output_) {
      check_output();
    }
    TensorInputs inputs;
    AttentionCall call = arguments_.load(inputs);
    throw_if_interrupted();
    Analysis found;
    {
      ProgressLine line;
      call.options.progress = line.callback();
      found = headway::analyze(call.query, call.key, call.options, request_);
    }
    if (output_) {
      write(found);
    }
    std::cout << (as_json_ ? json_of(found) : table(found));
    if (output_ && !as_json_) {
      std::cout << text(printable(*output_), "  every statistic, by name\n");
    }
  }

 private:
  void check_output() const {
    const std::optional<Format> format = format_of(*output_);
    if (format != Format::npz && format != Format::safetensors) {
      throw UsageError(text("-o: expected a file name that ends in .npz or .safetensors, found ", *output_));
    }
    check_not_read("-o", *output_, arguments_.texts());
    check_target(*output_, force_);
  }

  void write(const Analysis& found) const {
    const NamedViews views{
        {"entropy", found.entropy},   {"distance", found.distance}, {"first", found.first},
        {"diagonal", found.diagonal}, {"near", found.near},         {"lse", found.lse},
        {"received", found.received}, {"top_keys", found.top_keys}, {"top_weights", found.top_weights},
        {"map_mean", found.map_mean}, {"map_max", found.map_max},   {"similarity", found.similarity}};
    finish_files_when_interrupted();
    throw_if_interrupted();
    if (format_of(*output_) == Format::npz) {
      save_npz(*output_, views, {.overwrite = force_});
    } else {
      save_safetensors(*output_, views, {}, {.overwrite = force_});
    }
  }

  AttentionCallArguments arguments_;
  AnalysisRequest request_;
  std::optional<std::string> output_;
  bool force_ = false, as_json_ = false;
};

}  // namespace

std::unique_ptr<Command> make_analyze(CLI::App& app) { return std::make_unique<Analyze>(app); }

}  // namespace headway::cli
