// headway view: a page that shows attention.
#include <CLI/CLI.hpp>
#include <chrono>
#include <iostream>
#include <thread>

#include "arguments.h"
#include "attention_call.h"
#include "command.h"
#include "headway/headway.h"
#include "interrupt.h"
#include "output_files.h"
#include "progress_line.h"
#include "text.h"
#include "tokens.h"
#include "view_server.h"

namespace headway::cli {
namespace {

constexpr const char* examples = R"(Examples:
  headway view q.npy k.npy --causal
  headway view x.npy x.npy --heads 8 --tokens tokens.txt -o attention.html
  headway view q.npy k.npy --serve

A file of tokens has one a line, as many as there are keys. The page is one file that needs nothing else.)";

class View final : public Command {
 public:
  explicit View(CLI::App& app) {
    CLI::App& command = *app.add_subcommand("view", "A page that shows attention, in one HTML file");
    arguments_.add_files_to(command, true, Values::absent);
    add_text(command, "-o,--output", output_, "The page, a .html file [attention.html]")->group("Outputs");
    command.add_flag("--serve", serve_, "Show the page from this machine until Ctrl-C: every zoom level is then exact")
        ->group("Outputs");
    command.add_flag("--force", request_.overwrite, "Replace a file that exists")->group("Outputs");
    tokens_.add_to(command);
    command.add_option("--title", request_.title, "The page's title [Attention]")->type_name("TEXT");
    arguments_.add_options_to(command);
    command.footer(examples);
  }

  void run() override {
    if (serve_ && output_) {
      throw UsageError("expected either -o FILE or --serve, found both");
    }
    if (!serve_) {
      output_ = output_.value_or("attention.html");
      check_output();
    }
    TensorInputs inputs;
    const AttentionCall call = arguments_.load(inputs);
    request_.key_tokens = tokens_.keys();
    request_.query_tokens = tokens_.queries();
    throw_if_interrupted();
    output_ ? write(call) : serve(call);
  }

 private:
  void check_output() const {
    const std::filesystem::path path(*output_);
    if (path.extension() != ".html") {
      throw UsageError(text("-o: expected a file name that ends in .html, found ", *output_));
    }
    check_target(path, request_.overwrite);
  }

  void write(const AttentionCall& call) {
    finish_files_when_interrupted();  // an unnamed file exists while the work runs
    {
      ProgressLine line;
      request_.progress = line.callback();
      write_view(*output_, call.query, call.key, call.options, request_);
    }
    std::cout << text(printable(*output_), "  ", std::filesystem::file_size(*output_) / 1024, " KiB\n");
  }

  void serve(const AttentionCall& call) {
    std::optional<LiveView> view;
    {
      ProgressLine line;
      request_.progress = line.callback();
      const ViewLayer layer{call.query, call.key, call.options};
      view.emplace(std::span(&layer, 1), request_);
    }
    const ViewServer server(*view);
    std::cout << text(server.address(), "  Ctrl-C ends\n") << std::flush;
    while (interrupted_by() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }

  AttentionCallArguments arguments_;
  ViewRequest request_;
  TokenFiles tokens_;
  std::optional<std::string> output_;
  bool serve_ = false;
};

}  // namespace

std::unique_ptr<Command> make_view(CLI::App& app) { return std::make_unique<View>(app); }

}  // namespace headway::cli
