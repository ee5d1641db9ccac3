// Options with strict values. CLI11 would read 010 as 8 and -1 as a large unsigned number; here a number is decimal, in
// range, and all of the text.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "headway/dtype.h"
#include "text.h"

namespace headway::cli {

// The number that the whole of `found` spells; UsageError otherwise. For std::int64_t, std::uint64_t and double.
template <class Number>
Number parse_number(std::string_view found);

// "3,2,4"
template <class Number>
std::vector<Number> parse_numbers(std::string_view found);

std::vector<std::string> split_at_commas(std::string_view found);

std::string alternatives(const std::vector<std::string>& names);  // a, b or c

// An option whose text is parsed by `read`; a UsageError from it becomes CLI11's, prefixed with the option's name.
template <class Read>
CLI::Option* add_parsed(CLI::App& app, const std::string& name, const std::string& type, const std::string& help,
                        const Read& read) {
  const auto guarded = [name, read](const std::string& found) {
    try {
      read(found);
    } catch (const UsageError& error) {
      throw CLI::ValidationError(name, error.what());
    }
  };
  return app.add_option_function<std::string>(name, guarded, help)->type_name(type);
}

// Takes the text unchanged, even if empty: CLI11 would treat an empty one as an option that was not given.
CLI::Option* add_text(CLI::App& app, const std::string& name, std::optional<std::string>& target,
                      const std::string& help);

// `target` is a Number, or an optional one.
template <class Number, class Target>
CLI::Option* add_number(CLI::App& app, const std::string& name, Target& target, const std::string& help) {
  return add_parsed(app, name, "N", help,
                    [&target](const std::string& found) { target = parse_number<Number>(found); });
}

template <class Choice>
using Choices = std::vector<std::pair<std::string, Choice>>;

// `target` is a Choice, or an optional one.
template <class Choice, class Target>
CLI::Option* add_choice(CLI::App& app, const std::string& name, Target& target, const Choices<Choice>& choices,
                        const std::string& help) {
  std::vector<std::string> names;
  for (const auto& choice : choices) {
    names.push_back(choice.first);
  }
  return add_parsed(app, name, CLI::detail::join(names, "|"), help,
                    [&target, choices, names](const std::string& found) {
                      for (const auto& [spelling, choice] : choices) {
                        if (found == spelling) {
                          target = choice;
                          return;
                        }
                      }
                      throw UsageError(text("expected ", alternatives(names), ", found ", found));
                    });
}

const Choices<DType>& float_types();

}  // namespace headway::cli
