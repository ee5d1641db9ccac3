// Command lines, one argument a line, in a folder with a few small files: an exit code and printable lines. Files can
// be named there alone, and nothing can be written to them.
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <iostream>
#include <sstream>
#include <vector>

#include "command_line.h"
#include "headway/headway.h"
#include "support.h"

using namespace headway;

namespace {

const std::vector<std::string> files = {"x.npy", "y.npy", "b.npy", "two.npz", "l.safetensors", "t.txt", "w.npy"};

struct Surroundings {
  fuzz::Folder folder;

  Surroundings() {
    fuzz::require(::chdir(folder.path().c_str()) == 0, "chdir");
    std::signal(SIGXFSZ, SIG_IGN);
    set_threads(1);
    const Tensor x({2, 3, 4}), y({1, 2, 3, 4}, DType::f64), b({3, 3}, DType::b8), w({6});
    save_npy("x.npy", x);
    save_npy("y.npy", y);
    save_npy("b.npy", b);
    save_npy("w.npy", w);
    save_npz("two.npz", {{"a", x}, {"\u202e\x1b[31m", x}});
    MultiHeadAttention({.model_dim = 4, .heads = 2}).save("l.safetensors");
    std::ofstream("t.txt") << "one\n\x1b[2Jtwo\nthree\n";
  }
};

std::vector<std::string> lines_of(std::string_view text) {
  std::vector<std::string> lines;
  std::istringstream stream{std::string(text)};
  for (std::string line; std::getline(stream, line);) {
    lines.push_back(line.substr(0, line.find('\0')));  // where an argument ends for the system
  }
  return lines;
}

// Another folder, a server that waits for Ctrl-C, and sizes that are allowed but take their time.
bool is_left_out(const std::vector<std::string>& arguments) {
  double product = 1;
  for (const std::string& argument : arguments) {
    if (argument.find('/') != std::string::npos || argument.starts_with("--serve")) {
      return true;
    }
    std::istringstream digits(argument);
    for (char c = 0; digits.get(c);) {
      double number = 0;
      if (c >= '0' && c <= '9' && digits.unget() && digits >> number) {
        product *= std::max(number, 1.0);
      }
    }
  }
  const std::string command = arguments.empty() ? "" : arguments.front();
  return (command == "random" || command == "layer-init") && product > 1e4 && product < 0x1p62;
}

// While it lives, what is printed goes into texts and nothing can be written to files.
class Captured {
 public:
  Captured() {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit none{0, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &none);
  }
  ~Captured() {
    std::cout.rdbuf(cout_);
    std::cerr.rdbuf(cerr_);
    ::setrlimit(RLIMIT_FSIZE, &before_);
  }
  Captured(const Captured&) = delete;
  Captured& operator=(const Captured&) = delete;

  std::stringbuf out, err;

 private:
  std::streambuf *cout_ = std::cout.rdbuf(&out), *cerr_ = std::cerr.rdbuf(&err);
  rlimit before_{};
};

void check_lines(const std::string& printed) {
  std::istringstream lines(printed);
  for (std::string line; std::getline(lines, line);) {
    fuzz::require_printable(line);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Surroundings surroundings;
  const std::vector<std::string> arguments = lines_of({reinterpret_cast<const char*>(data), size});
  if (is_left_out(arguments)) {
    return 0;
  }
  int code = -1;
  std::string out, err;
  {
    Captured captured;
    code = cli::run_command_line(arguments);
    out = captured.out.str();
    err = captured.err.str();
  }
  fuzz::require(code >= 0 && code <= 2, "an exit code that is none");
  fuzz::require(code == 0 ? err.empty() : out.empty() && err.starts_with("headway"), "not one line for a failure", err);
  fuzz::require(code == 0 || err.find('\n') + 1 == err.size(), "more than one line for a failure", err);
  check_lines(out);
  check_lines(err);
  surroundings.folder.clean(files);
  return 0;
}
