// Options with strict values. CLI11 would read 010 as 8 and -1 as a large unsigned number; here a number is decimal, in
// range, and all of the text. Commands call CLI11 through these functions: its header takes 5 s to compile.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "headway/dtype.h"
#include "text.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace headway::cli {

// The number that the whole of `found` spells; UsageError otherwise. For std::int64_t, std::uint64_t and double.
template <class Number>
Number parse_number(std::string_view found);

// "3,2,4"
template <class Number>
std::vector<Number> parse_numbers(std::string_view found);

std::vector<std::string> split_at_commas(std::string_view found);

std::string alternatives(const std::vector<std::string>& names);  // a, b or c

// `headway NAME`, with `help` in the list of commands and `examples` at the end of its own help.
CLI::App& add_command(CLI::App& app, const std::string& name, const std::string& help, const std::string& examples);

// What else may be said of an option that was added.
class Option {
 public:
  explicit Option(CLI::Option& option) : option_(&option) {}
  Option& type_name(const std::string& name);  // of its value, in the help
  Option& group(const std::string& name);      // its heading in the help
  Option& required(bool value = true);

 private:
  CLI::Option* option_;
};

// An option whose text is parsed by `read`; a UsageError from it becomes CLI11's, prefixed with the option's name.
Option add_parsed(CLI::App& app, const std::string& name, const std::string& type, const std::string& help,
                  const std::function<void(const std::string& found)>& read);

// Takes the text unchanged, even if empty: CLI11 would treat an empty one as an option that was not given.
Option add_text(CLI::App& app, const std::string& name, std::optional<std::string>& target, const std::string& help);

// Takes the text as CLI11 reads it.
Option add_string(CLI::App& app, const std::string& name, std::string& target, const std::string& help);

Option add_flag(CLI::App& app, const std::string& name, bool& target, const std::string& help);

// `target` is a Number, or an optional one.
template <class Number, class Target>
Option add_number(CLI::App& app, const std::string& name, Target& target, const std::string& help) {
  return add_parsed(app, name, "N", help,
                    [&target](const std::string& found) { target = parse_number<Number>(found); });
}

template <class Choice>
using Choices = std::vector<std::pair<std::string, Choice>>;

// `target` is a Choice, or an optional one.
template <class Choice, class Target>
Option add_choice(CLI::App& app, const std::string& name, Target& target, const Choices<Choice>& choices,
                  const std::string& help) {
  std::vector<std::string> names;
  std::string type;
  for (const auto& choice : choices) {
    names.push_back(choice.first);
    type += (type.empty() ? "" : "|") + choice.first;
  }
  return add_parsed(app, name, type, help, [&target, choices, names](const std::string& found) {
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
