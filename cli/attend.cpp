// headway attend: attention over three arrays.
#include "attend.h"

#include <chrono>
#include <cmath>

#include "arguments.h"
#include "command.h"
#include "headway/headway.h"
#include "interrupt.h"
#include "progress_line.h"
#include "text.h"

namespace headway::cli {
namespace {

constexpr const char* attend_examples = R"(Examples:
  headway attend q.npy k.npy v.npy -o out.npy
  headway attend qkv.npz:q qkv.npz:k qkv.npz:v -o out.npy --causal --lse lse.npy
  headway attend x.npy x.npy x.npy -o out.npy --heads 8 --window 128,0 --weights w.npy
  headway attend q.npy k.npy v.npy -o out.npy --causal bottom_right --valid-lens 3,2
  mpirun -n 4 headway attend q.npy k.npy v.npy -o out.npy --causal   # each rank reads and writes its rows

Files are .npy, file.npz:name or file.safetensors:name. What is written is .npy, .npz or .safetensors.)";

// `sizes` with another last axis.
Dims with_last(Dims sizes, std::int64_t last) {
  sizes[sizes.size() - 1] = last;
  return sizes;
}

Dims without_last(const Dims& sizes) { return Dims(std::span(sizes.begin(), sizes.end() - 1)); }

class Attend final : public Command {
 public:
  explicit Attend(CLI::App& app) {
    CLI::App& command = add_command(app, "attend", "Attention over three arrays", attend_examples);
    arguments_.add_files_to(command, true);
    outputs_.add_to(command, "out", "The result, in the query's type and axes");
    outputs_.add_optional(command, "--weights", "weights", "The attention weights, (B,H,Sq,Sk), before dropout");
    outputs_.add_optional(command, "--lse", "lse", "The logarithm of each row's sum, (B,H,Sq)");
    arguments_.add_options_to(command);
    add_number<double>(command, "--timeout", timeout_, "Under mpirun: seconds to wait for another rank [60]")
        .group("Ranks");
  }

  void run() override {
    constexpr double longest = 1e9;  // 31 years
    const double seconds = timeout_.value_or(60);
    if (!(seconds > 0 && seconds <= longest)) {
      throw UsageError(text("--timeout is ", seconds, ", expected seconds above 0 and up to ", longest));
    }
    if (started_on_ranks()) {
      attend_on_ranks(arguments_, outputs_, std::chrono::milliseconds(std::llround(std::ceil(1000 * seconds))));
      return;
    }
    outputs_.check(arguments_.texts());
    TensorInputs inputs;
    AttentionCall call = arguments_.load(inputs);
    outputs_.check_type(call.query.dtype());
    // This also validates the whole call, before memory is allocated for its results.
    const Plan plan = explain(call.query, call.key, call.value, call.options,
                              {.lse = outputs_.wants("lse"), .weights = outputs_.wants("weights")});
    AttendResults results(call, outputs_);
    throw_if_interrupted();
    const auto start = std::chrono::steady_clock::now();
    {
      ProgressLine line;
      call.options.progress = line.callback();
      results.compute([&](TensorView out, const AttentionOutputs& outputs) {
        attention(call.query, call.key, call.value, out, call.options, outputs);
      });
    }
    const auto elapsed = std::chrono::steady_clock::now() - start;
    const NamedViews views = results.views();
    outputs_.write(views);
    outputs_.summarize(views, text(name(plan.engine), " engine  ", duration_text(elapsed)));
  }

 private:
  AttentionCallArguments arguments_;
  OutputFiles outputs_;
  std::optional<double> timeout_;
};

}  // namespace

AttendResults::AttendResults(const AttentionCall& call, const OutputFiles& wanted) : call_(call) {
  const Dims& query = call.query.sizes();
  const std::int64_t value_dim = call.value.sizes().back();
  out_ = Tensor::uninitialized(
      call.split ? Dims{query[0], query[2], query[1] * value_dim} : with_last(query, value_dim), call.query.dtype());
  if (wanted.wants("weights")) {
    weights_ = Tensor::uninitialized(with_last(query, call.key.size(call.key.rank() - 2)), call.query.dtype());
  }
  if (wanted.wants("lse")) {
    lse_ = Tensor::uninitialized(without_last(query), call.query.dtype() == DType::f64 ? DType::f64 : DType::f32);
  }
}

void AttendResults::compute(const Compute& attention) {
  AttentionOutputs outputs;
  if (weights_) {
    outputs.weights = weights_->view();
  }
  if (lse_) {
    outputs.lse = lse_->view();
  }
  attention(call_.split ? split_heads(out_.view(), call_.query.size(1)) : out_.view(), outputs);
}

NamedViews AttendResults::views() const {
  NamedViews result;
  const auto add = [&](const char* name, ConstTensorView view) {
    result.emplace(name, call_.batch_axis_added ? view.select(0, 0) : view);
  };
  add("out", out_);
  if (weights_) {
    add("weights", *weights_);
  }
  if (lse_) {
    add("lse", *lse_);
  }
  return result;
}

std::unique_ptr<Command> make_attend(CLI::App& app) { return std::make_unique<Attend>(app); }

}  // namespace headway::cli
