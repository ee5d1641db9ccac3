#include "examples.h"

using namespace headway;

namespace {

void example_engines() {
  for (const Engine engine : engines()) {  // the fastest first: perhaps cuda, then cpu, and always reference
    if (engine == Engine::reference) {
      std::cout << name(engine) << '\n';  // reference
    }
  }
}

void example_Plan() {
  const Tensor x({1, 4, 512, 64});
  const Plan plan = explain(x, x, x, {.window = Window{64, 64}});
  std::cout << plan.options << '\n';                                      // window (64, 64), scale 0.125
  std::cout << 100 * plan.pairs / plan.all_pairs << " % of all pairs\n";  // 23.6084 % of all pairs
  for (const Plan::PassedOver& other : plan.passed_over) {
    const std::string why = other.reason;  // "not built into this library"
  }
}

void example_to_string() {
  const Tensor x({1, 4, 512, 64});
  const std::string text = to_string(explain(x, x, x, {.engine = Engine::reference}));
  std::cout << text.substr(0, text.find('\n')) << '\n';  // attention on the reference engine
}

}  // namespace

void plan_examples() {
  example_engines();
  example_Plan();
  example_to_string();
}
