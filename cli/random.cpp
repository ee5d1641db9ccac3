// headway random: an array of random numbers, so that the other commands can be tried without data.
#include <algorithm>
#include <cmath>
#include <random>

#include "arguments.h"
#include "command.h"
#include "headway/headway.h"
#include "interrupt.h"
#include "output_files.h"

namespace headway::cli {
namespace {

constexpr const char* random_examples = R"(Examples:
  headway random 2,8,128,64 -o q.npy
  headway random 2,128,512 --dtype bf16 --seed 7 -o x.safetensors)";

// In [-1, 1), the same numbers everywhere: the standard specifies this generator exactly, but no distribution.
Tensor draw(const Dims& sizes, DType dtype, std::uint64_t seed) {
  std::mt19937_64 generator(seed);
  Tensor result(sizes, DType::f64);
  std::generate_n(result.as<double>(), result.elements(),
                  [&] { return std::ldexp(static_cast<double>(generator() >> 11), -52) - 1.0; });
  return dtype == DType::f64 ? std::move(result) : convert(result, dtype);
}

class Random final : public Command {
 public:
  explicit Random(CLI::App& app) {
    CLI::App& command = add_command(app, "random", "Makes an array of random numbers from -1 to 1", random_examples);
    add_parsed(command, "shape", "N,N,...", "The array's sizes", [this](const std::string& found) {
      sizes_ = parse_numbers<std::int64_t>(found);
    }).required();
    outputs_.add_to(command, "out", "The array");
    add_choice(command, "--dtype", dtype_, float_types(), "Element type [f32]");
    add_number<std::uint64_t>(command, "--seed", seed_, "The same seed gives the same numbers [0]");
  }

  void run() override {
    outputs_.check({});
    outputs_.check_type(dtype_);
    const Tensor array = draw(Dims(std::span<const std::int64_t>(sizes_)), dtype_, seed_);
    const NamedViews views = {{"out", array}};
    outputs_.write(views);
    outputs_.summarize(views, text("seed ", seed_));
  }

 private:
  std::vector<std::int64_t> sizes_;
  DType dtype_ = DType::f32;
  std::uint64_t seed_ = 0;
  OutputFiles outputs_;
};

}  // namespace

std::unique_ptr<Command> make_random(CLI::App& app) { return std::make_unique<Random>(app); }

}  // namespace headway::cli
