// Picks a command, runs it, and turns an error into one line and an exit code.
#include "command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <new>
#include <vector>

#include "attention_arguments.h"
#include "command.h"
#include "headway/headway.h"
#include "interrupt.h"
#include "text.h"

namespace headway::cli {
namespace {

enum ExitCode { success = 0, failure = 1, usage = 2, signalled = 128 };

constexpr const char* epilog = R"(headway COMMAND --help shows a command's options and examples.
Exit codes: 0 done, 1 failed, 2 not a valid request, 130 interrupted.)";

using Make = std::unique_ptr<Command> (*)(CLI::App&);
constexpr Make commands[] = {make_attend, make_analyze, make_layer, make_layer_init, make_explain,
                             make_random, make_view,    make_trace, make_info};

int report(const std::string& who, std::string_view what, int code) {
  std::cerr << printable(text(who, ": ", what)) << std::endl;
  return code;
}

int report_usage(const CLI::App& app, const CLI::ParseError& error, const std::vector<std::string>& arguments) {
  const auto parsed = app.get_subcommands();
  const std::string who = parsed.empty() ? "headway" : "headway " + parsed.front()->get_name();
  std::string what = error.what();
  if (arguments.empty()) {
    what = "expected a command";
  } else if (parsed.empty() && arguments.front()[0] != '-') {
    what = text("there is no command ", arguments.front());
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
  std::vector<std::unique_ptr<Command>> made;
  for (const Make make : commands) {
    made.push_back(make(app));
  }
  try {
    const std::vector<std::string> spelled_out = with_causal_spelled_out(arguments);
    app.parse(
        std::vector<std::string>(spelled_out.rbegin(), spelled_out.rend()));  // CLI11 expects them in reverse order
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() != 0) {
      return report_usage(app, error, arguments);
    }
    return flushed("headway", app.exit(error));  // --help and --version, which CLI11 reports as errors with code 0
  }
  const CLI::App* chosen = app.get_subcommands().front();
  const auto all = app.get_subcommands([](const CLI::App*) { return true; });
  const auto index = std::find(all.begin(), all.end(), chosen) - all.begin();
  return run(*made[static_cast<std::size_t>(index)], "headway " + chosen->get_name());
}

}  // namespace headway::cli
