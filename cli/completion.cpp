// headway completion: what a shell needs to complete commands and options.
#include <CLI/CLI.hpp>
#include <iostream>

#include "arguments.h"
#include "command.h"
#include "text.h"

namespace headway::cli {
namespace {

constexpr const char* completion_examples = R"(Examples:
  source <(headway completion bash)      in ~/.bashrc
  source <(headway completion zsh)       in ~/.zshrc)";

enum class Shell { bash, zsh };

// --options of a command, each with a space after it.
std::string options_of(const CLI::App& command) {
  std::string names;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      names += text("--", name, ' ');
    }
  }
  return names;
}

class Completion final : public Command {
 public:
  explicit Completion(CLI::App& app) : app_(app) {
    CLI::App& command =
        add_command(app, "completion", "A script that lets a shell complete commands and options", completion_examples);
    add_choice(command, "shell", shell_, Choices<Shell>{{"bash", Shell::bash}, {"zsh", Shell::zsh}}, "bash or zsh")
        .required();
  }

  void run() override {
    std::string names, cases;
    for (const CLI::App* command : app_.get_subcommands([](const CLI::App*) { return true; })) {
      names += command->get_name() + " ";
      cases += text("    ", command->get_name(), ") words=\"", options_of(*command), options_of(app_), "\" ;;\n");
    }
    if (shell_ == Shell::zsh) {
      std::cout << "autoload -U +X bashcompinit && bashcompinit\n";
    }
    std::cout << text(
        "_headway() {\n"
        "  local words word=\"${COMP_WORDS[COMP_CWORD]}\"\n"
        "  case \"${COMP_WORDS[1]}\" in\n",
        cases, "    *) words=\"", names, options_of(app_),
        "\" ;;\n"
        "  esac\n"
        "  [[ $COMP_CWORD == 1 ]] && words=\"",
        names, options_of(app_),
        "\"\n"
        "  COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n"
        "}\n"
        "complete -o default -F _headway headway\n");
  }

 private:
  const CLI::App& app_;
  Shell shell_ = Shell::bash;
};

}  // namespace

std::unique_ptr<Command> make_completion(CLI::App& app) { return std::make_unique<Completion>(app); }

}  // namespace headway::cli
