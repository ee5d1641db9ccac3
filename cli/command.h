// A command: its constructor adds its options, run() does its work.
#pragma once

#include <memory>

namespace CLI {
class App;
}

namespace headway::cli {

class Command {
 public:
  virtual ~Command() = default;

  // Results go to standard output only when everything has succeeded; failures are exceptions, which main turns into
  // an exit code.
  virtual void run() = 0;
};

// Each adds its subcommand to `app`, where the caller finds it by name.
std::unique_ptr<Command> make_analyze(CLI::App& app);
std::unique_ptr<Command> make_attend(CLI::App& app);
std::unique_ptr<Command> make_completion(CLI::App& app);
std::unique_ptr<Command> make_explain(CLI::App& app);
std::unique_ptr<Command> make_layer(CLI::App& app);
std::unique_ptr<Command> make_layer_init(CLI::App& app);
std::unique_ptr<Command> make_random(CLI::App& app);
std::unique_ptr<Command> make_trace(CLI::App& app);
std::unique_ptr<Command> make_view(CLI::App& app);
std::unique_ptr<Command> make_info(CLI::App& app);

}  // namespace headway::cli
