// headway info: what this build and this machine offer.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iomanip>
#include <iostream>
#include <thread>

#include "attention_call.h"
#include "command.h"
#include "headway/headway.h"
#include "text.h"

namespace headway::cli {
namespace {

// Large enough for an engine to use all its threads; only planned, never run.
Plan typical_plan(Engine engine) {
  const ConstTensorView typical = stand_in({2, 8, 1024, 64}, DType::f32);
  return explain(typical, typical, typical, {.engine = engine});
}

std::string offered_text(Engine engine) {
  const Plan plan = typical_plan(engine);
  return text(plan.kernel, ", ", plan.instruction_set, ", ", plan.threads, plan.threads == 1 ? " thread" : " threads");
}

std::string missing_text(Engine engine) {
  for (const Plan::PassedOver& passed : typical_plan(Engine::automatic).passed_over) {
    if (passed.engine == engine) {
      return "not offered: " + passed.reason;
    }
  }
  return "not offered";
}

std::string engine_text(Engine engine) {
  const std::vector<Engine> offered = engines();
  if (std::find(offered.begin(), offered.end(), engine) == offered.end()) {
    return missing_text(engine);
  }
  try {
    return offered_text(engine);
  } catch (const Unsupported& error) {  // offered, but not for arrays in host memory
    return std::string(without_operation(error.what()));
  }
}

// Asks the library what it was built with: a format that it has complains about the file's name instead.
template <class Load>
std::string format_text(const Load& load) {
  try {
    load("");
  } catch (const Unsupported& error) {
    return text("no: ", without_operation(error.what()));
  } catch (const FileError&) {
    return "yes";
  }
  return "yes";
}

class Info final : public Command {
 public:
  explicit Info(CLI::App& app) { app.add_subcommand("info", "What this build and this machine offer"); }

  void run() override {
    const auto line = [](const char* subject, const std::string& name, const std::string& what) {
      std::cout << std::left << std::setw(10) << subject << std::setw(14) << name << what << '\n';
    };
    line("version", "headway", version);
    const char* subject = "engines";
    for (const Engine engine : {Engine::cuda, Engine::cpu, Engine::reference}) {
      line(std::exchange(subject, ""), name(engine), engine_text(engine));
    }
    line("formats", ".npy", format_text([](const char* path) { load_npy(path); }));
    line("", ".npz", format_text([](const char* path) { load_npz(path); }));
    line("", ".safetensors", format_text([](const char* path) { load_safetensors(path); }));
    line("threads", std::to_string(get_threads()), text("of ", std::thread::hardware_concurrency(), " processors"));
  }
};

}  // namespace

std::unique_ptr<Command> make_info(CLI::App& app) { return std::make_unique<Info>(app); }

}  // namespace headway::cli
