// Texts that the command prints.
#include "text.h"

#include <algorithm>
#include <iomanip>

namespace headway::cli {
namespace {

bool is_identifier_character(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == ':';
}

}  // namespace

std::string_view without_operation(std::string_view library_text) {
  const std::size_t end = library_text.find(": ");
  if (end == std::string_view::npos || end == 0) {
    return library_text;
  }
  const std::string_view operation = library_text.substr(0, end);
  const bool identifier = std::all_of(operation.begin(), operation.end(), is_identifier_character);
  return identifier ? library_text.substr(end + 2) : library_text;
}

std::string duration_text(std::chrono::duration<double> duration) {
  const double seconds = duration.count();
  // Three digits, never an exponent: 1234 s stays 1234 s.
  const auto shown = [](double value, const char* unit) {
    const int decimals = value >= 100 ? 0 : value >= 10 ? 1 : 2;
    return text(std::fixed, std::setprecision(decimals), value, " ", unit);
  };
  return seconds < 0.9995 ? shown(seconds * 1e3, "ms") : shown(seconds, "s");
}

}  // namespace headway::cli
