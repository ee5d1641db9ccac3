// The tokens of keys and queries, from text files with one token per line.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "headway/tensor.h"

namespace CLI {
class App;
}

namespace headway::cli {

class TokenFiles {
 public:
  void add_to(CLI::App& app);  // --tokens and --query-tokens

  // Empty if no file is named. Expects one for each of the rows [.., rows, width].
  std::vector<std::string> keys(const ConstTensorView& rows) const;
  std::vector<std::string> queries(const ConstTensorView& rows) const;

 private:
  std::optional<std::string> keys_, queries_;
};

}  // namespace headway::cli
