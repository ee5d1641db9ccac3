// headway view: a page that shows attention.
#include <algorithm>
#include <chrono>
#include <fstream>
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

constexpr const char* view_examples = R"(Examples:
  headway view q.npy k.npy --causal
  headway view x.npy x.npy --heads 8 --tokens tokens.txt -o attention.html
  headway view q.npy k.npy --serve
  headway view q.npy k.npy --serve --port 8000

A file of tokens has one a line, as many as there are keys. The page is one file that needs nothing else.)";

constexpr const char* default_output = "attention.html";

// Whether a file is a page of ours, which a later one may take the place of.
bool is_page(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::string start(2000, '\0');
  file.read(start.data(), static_cast<std::streamsize>(start.size()));
  return start.find(R"(<meta name="generator" content="Headway">)") != std::string::npos;
}

class View final : public Command {
 public:
  explicit View(CLI::App& app) {
    CLI::App& command = add_command(app, "view", "A page that shows attention, in one HTML file", view_examples);
    arguments_.add_files_to(command, true, Values::absent);
    add_text(command, "-o,--output", output_, "The page, a .html file [attention.html]").group("Outputs");
    add_flag(command, "--serve", serve_, "Serve the page on this machine until Ctrl-C, with every zoom level exact")
        .group("Outputs");
    add_parsed(command, "--port", "N", "With --serve: the port to listen on [any free one]",
               [this](const std::string& found) {
                 port_ = static_cast<int>(std::min<std::int64_t>(parse_number<std::int64_t>(found), 65'536));
                 if (*port_ < 1 || *port_ > 65'535) {
                   throw UsageError(text("expected a port, 1 to 65535, found ", found));
                 }
               })
        .group("Outputs");
    add_flag(command, "--force", request_.overwrite, "Replace an existing file").group("Outputs");
    tokens_.add_to(command);
    add_string(command, "--title", request_.title, "The page's title [Attention]").type_name("TEXT");
    arguments_.add_options_to(command);
  }

  void run() override {
    if (serve_ && output_) {
      throw UsageError("expected either -o FILE or --serve, found both");
    }
    if (port_ && !serve_) {
      throw UsageError("--port is for --serve, which is not given");
    }
    if (!serve_) {
      request_.overwrite = request_.overwrite || (!output_ && is_page(default_output));
      output_ = output_.value_or(default_output);
      check_output();
    }
    TensorInputs inputs;
    const AttentionCall call = arguments_.load(inputs);
    request_.key_tokens = tokens_.keys(call.key);
    request_.query_tokens = tokens_.queries(call.query);
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
    const ViewServer server(*view, port_.value_or(0));
    std::cout << text(server.address(), "  Ctrl-C ends\n") << std::flush;
    while (interrupted_by() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }

  AttentionCallArguments arguments_;
  ViewRequest request_;
  TokenFiles tokens_;
  std::optional<std::string> output_;
  std::optional<int> port_;
  bool serve_ = false;
};

}  // namespace

std::unique_ptr<Command> make_view(CLI::App& app) { return std::make_unique<View>(app); }

}  // namespace headway::cli
