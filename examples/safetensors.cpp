// Projections from a .safetensors file, attention between them, the result into another file.
#include <headway/headway.h>

#include <filesystem>
#include <iostream>

using namespace headway;

int main() {
  const auto folder = std::filesystem::temp_directory_path() / "headway_example_safetensors";
  std::filesystem::create_directories(folder);
  // Somebody's model: here a layer of our own, saved.
  MultiHeadAttention({.model_dim = 32, .heads = 4, .seed = 3}).save(folder / "model.safetensors", true);

  const NamedTensors model = load_safetensors(folder / "model.safetensors").tensors;
  const Tensor x({1, 10, 32});
  const auto heads = [](const Tensor& t) { return t.view().unflatten(-1, {4, 8}).transpose(1, 2); };
  const Tensor q = linear(x, model.at("W_q")), k = linear(x, model.at("W_k")), v = linear(x, model.at("W_v"));
  const Tensor context = attention(heads(q), heads(k), heads(v));
  save_safetensors(folder / "context.safetensors", {{"context", context}}, {}, {.overwrite = true});
  const Tensor back = load_safetensors(folder / "context.safetensors").tensors.at("context").clone();
  std::filesystem::remove_all(folder);
  std::cout << "context " << back.sizes() << ", written and read\n";
  try {
    model.at("W_x");
  } catch (const InvalidArgument& error) {
    std::cout << error.what() << "\n";
  }
  return back.sizes() == Dims{1, 4, 10, 8} ? 0 : 1;
}
