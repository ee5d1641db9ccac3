// headway info: what a file holds, or what this build and this machine offer.
#include <algorithm>
#include <iomanip>
#include <iostream>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "arguments.h"
#include "attention_call.h"
#include "command.h"
#include "headway/headway.h"
#include "json.h"
#include "tensor_inputs.h"
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

constexpr const char* examples = R"(Examples:
  headway info
  headway info model.safetensors
  headway info model.safetensors --json)";

// Names, values: "engines", {{"cpu", "..."}, ...}
struct Subject {
  const char* name;
  std::vector<std::pair<std::string, std::string>> entries;
};

std::vector<Subject> offers() {
  Subject offered{"engines", {}};
  for (const Engine engine : {Engine::cuda, Engine::cpu, Engine::reference}) {
    offered.entries.emplace_back(name(engine), engine_text(engine));
  }
  return {
      {"version", {{"headway", version}}},
      offered,
      {"formats",
       {{".npy", format_text([](const char* path) { load_npy(path); })},
        {".npz", format_text([](const char* path) { load_npz(path); })},
        {".safetensors", format_text([](const char* path) { load_safetensors(path); })}}},
      {"threads", {{std::to_string(get_threads()), text("of ", std::thread::hardware_concurrency(), " processors")}}}};
}

void print_lines(const std::vector<Subject>& subjects) {
  for (const auto& [name, entries] : subjects) {
    const char* shown = name;
    for (const auto& [entry, what] : entries) {
      std::cout << std::left << std::setw(10) << std::exchange(shown, "") << std::setw(14) << entry << what << '\n';
    }
  }
}

void print_json(const std::vector<Subject>& subjects) {
  JsonObject all;
  for (const auto& [name, entries] : subjects) {
    std::string members;
    for (const auto& [entry, what] : entries) {
      members += text(members.empty() ? "" : ", ", json(entry), ": ", json(what));
    }
    all.add_raw(name, text("{", members, "}"));
  }
  std::cout << all.str() << '\n';
}

std::string json_of(const Dims& sizes) {
  std::vector<std::string> numbers;
  for (const std::int64_t size : sizes) {
    numbers.push_back(json(size));
  }
  return json_list(numbers);
}

class Info final : public Command {
 public:
  explicit Info(CLI::App& app) {
    CLI::App& command =
        add_command(app, "info", "Lists the tensors in a file; without one, engines, formats and threads", examples);
    add_text(command, "file", file_, "A .npy, .npz or .safetensors file");
    add_flag(command, "--json", as_json_, "As JSON, for programs");
  }

  void run() override {
    if (file_) {
      return show_file();
    }
    as_json_ ? print_json(offers()) : print_lines(offers());
  }

 private:
  void show_file() const {
    const std::optional<TensorName> named = parse_tensor_name(*file_);
    if (!named || named->tensor) {
      throw UsageError(text("expected a .npy, .npz or .safetensors file, found ", file_->empty() ? "nothing" : *file_));
    }
    const NamedTensors tensors = read(*named);
    as_json_ ? print_tensors_as_json(tensors) : print_tensors(tensors);
  }

  static void print_tensors(const NamedTensors& tensors) {
    std::size_t width = 0;
    for (const auto& entry : tensors) {
      width = std::max(width, printable(entry.first).size());
    }
    for (const auto& [name, tensor] : tensors) {
      std::cout << std::left << std::setw(static_cast<int>(width)) << printable(name) << (name.empty() ? "" : "  ")
                << text(tensor.dtype(), " ", tensor.sizes()) << '\n';
    }
  }

  static void print_tensors_as_json(const NamedTensors& tensors) {
    JsonObject all;
    for (const auto& [entry, tensor] : tensors) {
      all.add_raw(entry,
                  text("{\"dtype\": ", json(name(tensor.dtype())), ", \"shape\": ", json_of(tensor.sizes()), "}"));
    }
    std::cout << all.str() << '\n';
  }

  std::optional<std::string> file_;
  bool as_json_ = false;
};

}  // namespace

std::unique_ptr<Command> make_info(CLI::App& app) { return std::make_unique<Info>(app); }

}  // namespace headway::cli
