// Options with strict values.
#include "arguments.h"

#include <CLI/CLI.hpp>
#include <charconv>
#include <type_traits>

namespace headway::cli {
namespace {

template <class Number>
const char* kind() {
  if (std::is_floating_point_v<Number>) {
    return "a number";
  }
  return std::is_signed_v<Number> ? "a whole number" : "a whole number of 0 or more";
}

}  // namespace

template <class Number>
Number parse_number(std::string_view found) {
  Number number{};
  const char* end = found.data() + found.size();
  const auto [stopped, error] = std::from_chars(found.data(), end, number);
  if (error == std::errc::result_out_of_range) {
    throw UsageError(text("expected ", kind<Number>(), " that fits 64 bits, found ", found));
  }
  if (error != std::errc{} || stopped != end) {
    throw UsageError(text("expected ", kind<Number>(), ", found ", found.empty() ? "nothing" : found));
  }
  return number;
}

std::vector<std::string> split_at_commas(std::string_view found) {
  std::vector<std::string> parts(1);
  for (const char c : found) {
    if (c == ',') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

template <class Number>
std::vector<Number> parse_numbers(std::string_view found) {
  std::vector<Number> numbers;
  for (const std::string& part : split_at_commas(found)) {
    numbers.push_back(parse_number<Number>(part));
  }
  return numbers;
}

template std::int64_t parse_number(std::string_view);
template std::uint64_t parse_number(std::string_view);
template double parse_number(std::string_view);
template std::vector<std::int64_t> parse_numbers(std::string_view);
template std::vector<double> parse_numbers(std::string_view);

std::string alternatives(const std::vector<std::string>& names) {
  std::string result;
  for (std::size_t i = 0; i < names.size(); ++i) {
    result += text(i == 0 ? "" : i + 1 == names.size() ? " or " : ", ", names[i]);
  }
  return result;
}

CLI::App& add_command(CLI::App& app, const std::string& name, const std::string& help, const std::string& examples) {
  CLI::App& command = *app.add_subcommand(name, help);
  command.footer(examples);
  return command;
}

Option& Option::type_name(const std::string& name) {
  option_->type_name(name);
  return *this;
}

Option& Option::group(const std::string& name) {
  option_->group(name);
  return *this;
}

Option& Option::required(bool value) {
  option_->required(value);
  return *this;
}

Option add_parsed(CLI::App& app, const std::string& name, const std::string& type, const std::string& help,
                  const std::function<void(const std::string& found)>& read) {
  const auto guarded = [name, read](const std::string& found) {
    try {
      read(found);
    } catch (const UsageError& error) {
      throw CLI::ValidationError(name, error.what());
    }
  };
  return Option(*app.add_option_function<std::string>(name, guarded, help)).type_name(type);
}

Option add_text(CLI::App& app, const std::string& name, std::optional<std::string>& target, const std::string& help) {
  return add_parsed(app, name, "FILE", help, [&target](const std::string& found) { target = found; });
}

Option add_string(CLI::App& app, const std::string& name, std::string& target, const std::string& help) {
  return Option(*app.add_option(name, target, help));
}

Option add_flag(CLI::App& app, const std::string& name, bool& target, const std::string& help) {
  return Option(*app.add_flag(name, target, help));
}

const Choices<DType>& float_types() {
  static const Choices<DType> choices = [] {
    Choices<DType> result;
    for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
      result.emplace_back(name(dtype), dtype);
    }
    return result;
  }();
  return choices;
}

}  // namespace headway::cli
