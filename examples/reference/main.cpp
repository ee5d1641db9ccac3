// Runs every example. They write their files into a folder of their own, which is removed again.
#include <unistd.h>

#include "examples.h"

namespace {

void run_all() {
  analysis_examples();
  attention_examples();
  cache_examples();
  distributed_examples();
  dtype_examples();
  error_examples();
  io_examples();
  layer_examples();
  linear_examples();
  masks_examples();
  optimizer_examples();
  plan_examples();
  printable_examples();
  rope_examples();
  serving_examples();
  tensor_examples();
  threads_examples();
  trace_examples();
  view_examples();
}

}  // namespace

int main() {
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / ("headway-reference-" + std::to_string(getpid()));
  fs::create_directories(folder);
  fs::current_path(folder);
  std::cout << std::boolalpha;
  int status = 0;
  try {
    run_all();
  } catch (const headway::Unsupported& error) {
    std::cout << "skipped: " << error.what() << '\n';  // a build without zlib or nlohmann-json
    status = 77;
  }
  fs::current_path(folder.parent_path());
  fs::remove_all(folder);
  return status;
}
