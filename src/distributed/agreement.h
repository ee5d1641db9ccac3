// Before any row is sent, ranks compare their arguments: a difference, or an error on one rank, becomes the same error
// on all of them.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/text.h"
#include "headway/distributed.h"

namespace headway::distributed {

class Agreement {
 public:
  Agreement(std::string operation, Transport& transport) : operation_(std::move(operation)), transport_(transport) {}

  // Adds a value that must be the same on all ranks.
  template <class Value>
  void same(const char* name, const Value& value) {
    shared_.push_back({name, text(value)});
  }
  // Numbers of this rank that the others need to know.
  void own(std::int64_t number) { own_.push_back(number); }

  // Runs a check on this rank, and keeps its error for reach().
  void attempt(const std::function<void()>& check);

  // The numbers of all ranks. Throws the error of the first rank that has one, or one that names the difference.
  std::vector<std::vector<std::int64_t>> reach();

 private:
  struct Field {
    std::string name, value;
  };
  std::string serialized() const;
  [[noreturn]] void throw_error(std::size_t rank, const std::string& kind, const std::string& error) const;

  std::string operation_;
  Transport& transport_;
  std::vector<Field> shared_;
  std::vector<std::int64_t> own_;
  std::string error_kind_, error_;
};

// Shape and numbers of a small tensor, short enough to compare: "(2) #1f0e..."; "none" where there is none.
std::string digest(const std::optional<ConstTensorView>& view);
std::string digest(const std::optional<Sharding>& sharding);

}  // namespace headway::distributed
