// The options of attention that every command shares, as flags.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "headway/attention.h"
#include "tensor_inputs.h"

namespace CLI {
class App;
}

namespace headway::cli {

// Reads an array that a flag names, in place of TensorInputs::load.
using ReadArray = std::function<ConstTensorView(const std::string& name)>;

class AttentionArguments {
 public:
  void add_to(CLI::App& app);

  // The option values that may name input files, to compare with the outputs.
  std::vector<std::string> texts() const;

  // Reads the files that the flags name; the views live as long as `inputs`. `read_matrix` reads mask and bias.
  AttentionOptions options(TensorInputs& inputs, const ReadArray& read_matrix = {}) const;
  bool is_causal() const { return scalars_.causal != Causal::none; }

 private:
  void place_mask_file(const ReadArray& read, AttentionOptions& result) const;

  AttentionOptions scalars_;  // what needs no file
  std::optional<std::string> mask_, mask_file_, bias_, valid_lens_, query_lens_, alibi_slopes_, sinks_;
};

// "128,0" or "none,16"
Window parse_window(const std::string& found);

// Arrays without a batch axis have valid_lens without one; the attention behind --heads and the layer has one.
AttentionOptions with_batch_axis(AttentionOptions options);

// --causal alone means --causal=square. CLI11 would take the next argument, even a file, as its value, so the flag is
// expanded before CLI11 sees it.
std::vector<std::string> with_causal_spelled_out(const std::vector<std::string>& arguments);

}  // namespace headway::cli
