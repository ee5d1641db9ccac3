// Writes JSON sequentially. A tree of nlohmann::json values allocates while it is destroyed, and terminates the program
// if that fails; single numbers and texts do not.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace headway::io {

// A number, a bool or a text. Bytes that are not UTF-8 are replaced.
template <class Scalar>
std::string json_text(const Scalar& scalar) {
  return nlohmann::json(scalar).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// `write` makes JSON of each value.
template <class Values, class Write>
std::string json_array(const Values& values, const Write& write) {
  std::string result = "[";
  for (const auto& value : values) {
    result += result.size() > 1 ? "," : "";
    result += write(value);
  }
  return result += ']';
}

template <class Values>
std::string json_array(const Values& values) {
  return json_array(values, [](const auto& value) { return json_text(value); });
}

class JsonObject {
 public:
  // `json` as it stands.
  JsonObject& add(std::string_view key, std::string_view json) {
    result_ += result_.size() > 1 ? "," : "";
    result_ += json_text(key);
    result_ += ':';
    result_ += json;
    return *this;
  }
  template <class Scalar>
  JsonObject& set(std::string_view key, const Scalar& scalar) {
    return add(key, json_text(scalar));
  }
  std::string text() const { return result_ + "}"; }

 private:
  std::string result_ = "{";
};

}  // namespace headway::io
