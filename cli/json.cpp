// JSON that --json prints.
#include "json.h"

#include <cmath>
#include <limits>
#include <sstream>

namespace headway::cli {
namespace {

std::string joined(const std::vector<std::string>& items) {
  std::string result;
  for (const std::string& item : items) {
    result += (result.empty() ? "" : ", ") + item;
  }
  return result;
}

}  // namespace

std::string json(std::string_view found) {
  constexpr const char* digits = "0123456789abcdef";
  std::string result = "\"";
  for (const char c : found) {
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      result += "\\u00";
      result += digits[c >> 4];
      result += digits[c & 15];
    } else {
      result += c;
    }
  }
  return result + '"';
}

std::string json(double number) {
  if (!std::isfinite(number)) {
    return "null";
  }
  std::ostringstream stream;
  stream.precision(std::numeric_limits<double>::max_digits10);
  stream << number;
  return stream.str();
}

std::string json(std::int64_t number) { return std::to_string(number); }

std::string json(const Dims& sizes) {
  std::vector<std::string> numbers;
  for (const std::int64_t size : sizes) {
    numbers.push_back(json(size));
  }
  return json_list(numbers);
}

JsonObject& JsonObject::add_raw(std::string_view name, const std::string& value) {
  members_.push_back(json(name) + ": " + value);
  return *this;
}

std::string JsonObject::str() const {
  std::string result = "{";
  for (const std::string& member : members_) {
    result += std::string(result == "{" ? "\n" : ",\n") + "  " + member;
  }
  return result + "\n}";
}

std::string json_list(const std::vector<std::string>& items) { return "[" + joined(items) + "]"; }

std::string json_members(const std::vector<std::string>& items) { return "{" + joined(items) + "}"; }

}  // namespace headway::cli
