// JSON that --json prints: objects of texts, numbers and lists, built as text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "headway/tensor.h"

namespace headway::cli {

std::string json(std::string_view found);  // in quotes, with what may not stand there escaped
std::string json(double number);           // null where it is not finite
std::string json(std::int64_t number);
std::string json(const Dims& sizes);  // [2, 3]

// Members in the order in which they were added, one on each line.
class JsonObject {
 public:
  template <class Value>
  JsonObject& add(std::string_view name, const Value& value) {
    return add_raw(name, json(value));
  }
  JsonObject& add_raw(std::string_view name, const std::string& value);  // JSON already
  std::string str() const;

 private:
  std::vector<std::string> members_;
};

std::string json_list(const std::vector<std::string>& items);     // of JSON
std::string json_members(const std::vector<std::string>& items);  // an object on one line, of "name": JSON

}  // namespace headway::cli
