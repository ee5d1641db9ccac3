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
      return passed.reason;
    }
  }
  return "";
}

// An engine or a file format: whether it is there, and what it does or why it is not.
struct Offer {
  std::string name;
  bool offered;
  std::string details;
};

Offer offer_of(Engine engine) {
  const std::vector<Engine> offered = engines();
  if (std::find(offered.begin(), offered.end(), engine) == offered.end()) {
    return {name(engine), false, missing_text(engine)};
  }
  try {
    return {name(engine), true, offered_text(engine)};
  } catch (const Unsupported& error) {  // offered, but not for arrays in host memory
    return {name(engine), true, std::string(without_operation(error.what()))};
  }
}

// Asks the library what it was built with: a format that it has complains about the file's name instead.
template <class Load>
Offer offer_of(const char* format, const Load& load) {
  try {
    load("");
  } catch (const Unsupported& error) {
    return {format, false, std::string(without_operation(error.what()))};
  } catch (const FileError&) {
    return {format, true, ""};
  }
  return {format, true, ""};
}

constexpr const char* info_examples = R"(Examples:
  headway info
  headway info model.safetensors
  headway info model.safetensors --json)";

struct Offers {
  std::vector<Offer> engines, formats;
  std::int64_t threads, processors;
};

Offers offers() {
  Offers all{{},
             {offer_of(".npy", [](const char* path) { load_npy(path); }),
              offer_of(".npz", [](const char* path) { load_npz(path); }),
              offer_of(".safetensors", [](const char* path) { load_safetensors(path); })},
             get_threads(),
             std::thread::hardware_concurrency()};
  for (const Engine engine : {Engine::cuda, Engine::cpu, Engine::reference}) {
    all.engines.push_back(offer_of(engine));
  }
  return all;
}

void print_line(const char* subject, const std::string& name, const std::string& what) {
  std::cout << std::left << std::setw(10) << subject << std::setw(14) << name << what << '\n';
}

void print_lines(const Offers& all) {
  print_line("version", "headway", version);
  const char* subject = "engines";
  for (const auto& [name, offered, details] : all.engines) {
    print_line(std::exchange(subject, ""), name, offered ? details : text("not offered: ", details));
  }
  subject = "formats";
  for (const auto& [name, offered, details] : all.formats) {
    print_line(std::exchange(subject, ""), name, offered ? "yes" : text("no: ", details));
  }
  print_line("threads", std::to_string(all.threads), text("of ", all.processors, " processors"));
}

std::string json_of(const std::vector<Offer>& offers) {
  std::vector<std::string> members;
  for (const auto& [name, offered, details] : offers) {
    members.push_back(
        text(json(name), ": {\"offered\": ", offered ? "true" : "false", ", \"details\": ", json(details), "}"));
  }
  return json_members(members);
}

void print_json(const Offers& all) {
  std::cout << JsonObject()
                   .add("version", std::string_view(version))
                   .add_raw("engines", json_of(all.engines))
                   .add_raw("formats", json_of(all.formats))
                   .add("threads", all.threads)
                   .add("processors", all.processors)
                   .str()
            << '\n';
}

class Info final : public Command {
 public:
  explicit Info(CLI::App& app) {
    CLI::App& command = add_command(
        app, "info", "Lists the tensors in a file; without one, engines, formats and threads", info_examples);
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
      all.add_raw(entry, text("{\"dtype\": ", json(name(tensor.dtype())), ", \"shape\": ", json(tensor.sizes()), "}"));
    }
    std::cout << all.str() << '\n';
  }

  std::optional<std::string> file_;
  bool as_json_ = false;
};

}  // namespace

std::unique_ptr<Command> make_info(CLI::App& app) { return std::make_unique<Info>(app); }

}  // namespace headway::cli
