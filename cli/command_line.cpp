// Picks a command, runs it, and turns an error into one line and an exit code.
#include "command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <iostream>
#include <limits>
#include <new>
#include <vector>

#include "arguments.h"
#include "attention_arguments.h"
#include "command.h"
#include "headway/headway.h"
#include "interrupt.h"
#include "text.h"

namespace headway::cli {
namespace {

constexpr int success = static_cast<int>(ExitCode::success), failure = static_cast<int>(ExitCode::failure),
              usage = static_cast<int>(ExitCode::usage), signalled = static_cast<int>(ExitCode::signalled);

constexpr const char* epilog = R"(headway COMMAND --help shows a command's options and examples.
Exit codes: 0 done, 1 failed, 2 not a valid request, 130 interrupted.)";

using Make = std::unique_ptr<Command> (*)(CLI::App&);
constexpr Make commands[] = {make_attend, make_analyze, make_layer, make_layer_init, make_explain,
                             make_random, make_view,    make_trace, make_info,       make_completion};

int report(const std::string& who, std::string_view what, int code) {
  std::cerr << printable(text(who, ": ", what)) << std::endl;
  return code;
}

// How many letters to insert, remove, replace or swap with a neighbour to get from one word to the other.
std::size_t distance(const std::string& from, const std::string& to) {
  std::vector<std::vector<std::size_t>> steps(from.size() + 1, std::vector<std::size_t>(to.size() + 1));
  for (std::size_t i = 0; i <= from.size(); ++i) {
    for (std::size_t j = 0; j <= to.size(); ++j) {
      if (i == 0 || j == 0) {
        steps[i][j] = i + j;
        continue;
      }
      const bool same = from[i - 1] == to[j - 1];
      steps[i][j] = std::min({steps[i - 1][j] + 1, steps[i][j - 1] + 1, steps[i - 1][j - 1] + (same ? 0 : 1)});
      if (i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1]) {
        steps[i][j] = std::min(steps[i][j], steps[i - 2][j - 2] + 1);
      }
    }
  }
  return steps.back().back();
}

// "; did you mean NAME?" with the name that a word begins, or that is nearest to it, if one is near.
std::string suggestion(const std::vector<std::string>& names, const std::string& word) {
  constexpr std::size_t longest_word = 20, furthest = 2, least_begun = 3;
  std::string nearest;
  std::size_t least = furthest + 1;
  if (word.size() > longest_word) {
    return "";
  }
  for (const std::string& name : names) {
    const bool is_begun = name.starts_with(word) && word.size() >= word.find_first_not_of('-') + least_begun;
    const std::size_t steps = is_begun ? 0 : distance(word, name);
    if (steps < least && steps < word.size()) {
      least = steps;
      nearest = name;
    }
  }
  return nearest.empty() ? "" : text("; did you mean ", nearest, "?");
}

std::vector<std::string> names_of_commands(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  return names;
}

void add_options(const CLI::App& app, std::vector<std::string>& names) {
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      names.push_back("--" + name);
    }
  }
}

// What is wrong with arguments of a command, or of headway itself, that have no place there.
std::string unexpected(const CLI::App& app, const CLI::App* command, const std::vector<std::string>& arguments) {
  std::vector<std::string> options;
  add_options(app, options);
  if (command != nullptr) {
    add_options(*command, options);
  }
  for (const std::string& argument : arguments) {
    if (argument.size() > 1 && argument[0] == '-') {
      const std::string option = argument.substr(0, argument.find('='));
      return text("there is no option ", option, suggestion(options, option));
    }
  }
  return text("expected no further argument, found ", arguments.front());
}

// "help attend" as "attend --help", and "help" as "--help".
std::vector<std::string> with_help_spelled_out(std::vector<std::string> arguments) {
  if (!arguments.empty() && arguments.front() == "help") {
    arguments.erase(arguments.begin());
    arguments.emplace_back("--help");
  }
  return arguments;
}

// "--output: 1 required FILE missing" in the words of the other errors.
std::string value_missing(const std::string& what) {
  const std::string_view before = ": 1 required ", after = " missing";
  const std::size_t at = what.find(before);
  if (at == std::string::npos || !what.ends_with(after)) {
    return what;
  }
  const std::size_t type = at + before.size();
  return text(what.substr(0, at), ": expected ", what.substr(type, what.size() - after.size() - type),
              ", found nothing");
}

int report_usage(const CLI::App& app, const CLI::ParseError& error, const std::vector<std::string>& arguments) {
  const auto parsed = app.get_subcommands();
  const CLI::App* command = parsed.empty() ? nullptr : parsed.front();
  const std::string who = command == nullptr ? "headway" : "headway " + command->get_name();
  std::string what = value_missing(error.what());
  if (arguments.empty()) {
    what = "expected a command";
  } else if (command == nullptr && arguments.front()[0] != '-') {
    what = text("there is no command ", arguments.front(), suggestion(names_of_commands(app), arguments.front()));
  } else if (const std::vector<std::string> extra = app.remaining(true); !extra.empty()) {
    what = unexpected(app, command, extra);
  } else if (command == nullptr) {
    what = "expected a command";
  }
  return report(who, text(what, " (see ", who, " --help)"), usage);
}

// `code`, unless the output could not be written.
int flushed(const std::string& who, int code) {
  return std::cout.flush() ? code : report(who, "cannot write to standard output", failure);
}

int run(Command& command, const std::string& who) {
  try {
    command.run();
    return flushed(who, success);
  } catch (const AlreadyReported& error) {
    return static_cast<int>(error.code);
  } catch (const UsageError& error) {
    return report(who, error.what(), usage);
  } catch (const InvalidArgument& error) {
    return report(who, without_operation(error.what()), usage);
  } catch (const TypeMismatch& error) {
    return report(who, without_operation(error.what()), usage);
  } catch (const Cancelled&) {
    return report(who, "interrupted", signalled + interrupted_by());
  } catch (const Error& error) {
    return report(who, without_operation(error.what()), failure);
  } catch (const std::bad_alloc&) {
    return report(who, "out of memory", failure);
  } catch (const std::exception& error) {
    return report(who, error.what(), failure);
  }
}

}  // namespace

int run_command_line(const std::vector<std::string>& arguments) {
  CLI::App app("Exact multi-head attention over arrays in files.", "headway");
  app.set_version_flag("--version", text("headway ", version));
  app.footer(epilog);
  app.require_subcommand(1);
  app.fallthrough();  // options of the app may follow the command
  std::int64_t threads = 0;
  add_parsed(app, "--threads", "N", "Threads to use [one for each processor]", [&](const std::string& found) {
    threads = parse_number<std::int64_t>(found);
    if (threads < 1 || threads > std::numeric_limits<int>::max()) {
      throw UsageError(text("expected 1 or more, found ", found));
    }
  });
  std::vector<std::unique_ptr<Command>> made;
  for (const Make make : commands) {
    made.push_back(make(app));
  }
  try {
    const std::vector<std::string> spelled_out = with_causal_spelled_out(with_help_spelled_out(arguments));
    app.parse(
        std::vector<std::string>(spelled_out.rbegin(), spelled_out.rend()));  // CLI11 expects them in reverse order
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() != 0) {
      return report_usage(app, error, arguments);
    }
    return flushed("headway", app.exit(error));  // --help and --version, which CLI11 reports as errors with code 0
  }
  if (threads > 0) {
    set_threads(static_cast<int>(threads));
  }
  const CLI::App* chosen = app.get_subcommands().front();
  const auto all = app.get_subcommands([](const CLI::App*) { return true; });
  const auto index = std::find(all.begin(), all.end(), chosen) - all.begin();
  return run(*made[static_cast<std::size_t>(index)], "headway " + chosen->get_name());
}

}  // namespace headway::cli
