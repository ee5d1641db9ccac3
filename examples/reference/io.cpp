#include "examples.h"

using namespace headway;

namespace {

void example_save_npy() {
  const Tensor x = Tensor::of<float>({2, 2}, {1, 2, 3, 4});
  save_npy("x.npy", x);
  std::cout << load_npy("x.npy").view() << '\n';
  // [[1 2]
  //  [3 4]]
  try {
    save_npy("x.npy", x);
  } catch (const FileError& error) {
    std::cout << error.what() << '\n';  // save_npy: x.npy: the file exists; set overwrite to replace it
  }
  save_npy("x.npy", x, {.overwrite = true});
}

void example_load_npy() {
  save_npy("mask.npy", Tensor::of<bool>({3}, {true, false, true}));
  const Tensor mask = load_npy("mask.npy");
  std::cout << mask.dtype() << ' ' << mask.sizes() << '\n';  // bool (3,)
}

void example_save_npz() {
  const Tensor query({2, 4}), key({3, 4});
  save_npz("inputs.npz", {{"query", query}, {"key", key}}, {.compress = true});
  const NamedTensors inputs = load_npz("inputs.npz");
  std::cout << inputs.at("key").sizes() << ' ' << inputs.names() << '\n';  // (3, 4) key, query
}

void example_load_npz() {
  save_npz("one.npz", {{"x", Tensor({5})}}, {.overwrite = true});
  // A limit on what a hostile file may have us allocate.
  const NamedTensors tensors = load_npz("one.npz", {.tensor_bytes = 1 << 20});
  std::cout << tensors.size() << ' ' << tensors.at("x").sizes() << '\n';  // 1 (5,)
}

void example_save_safetensors() {
  const Tensor weight({4, 4}, DType::bf16);
  save_safetensors("layer.safetensors", {{"W_q", weight}}, {{"made by", "the reference"}});
}

void example_load_safetensors() {
  save_safetensors("w.safetensors", {{"W_q", Tensor({4, 4}, DType::bf16)}}, {{"made by", "the reference"}});
  const SafetensorsFile file = load_safetensors("w.safetensors");
  std::cout << file.tensors.at("W_q").dtype() << ", " << file.metadata.at("made by") << '\n';  // bf16, the reference
}

void example_npy_shape() {
  save_npy("large.npy", Tensor({4, 1000}), {.overwrite = true});
  const NpyShape shape = npy_shape("large.npy");
  std::cout << shape.dtype << ' ' << shape.sizes << '\n';  // f32 (4, 1000)
}

void example_load_npy_slice() {
  save_npy("rows.npy", Tensor::of<float>({3, 2}, {1, 2, 3, 4, 5, 6}), {.overwrite = true});
  std::cout << load_npy_slice("rows.npy", 0, 1, 3).view() << '\n';
  // [[3 4]
  //  [5 6]]
}

void example_begin_npy() {
  // In one process here; ranks of a job would each write their rows between two barriers.
  const auto temporary = begin_npy("parts.npy", {DType::f32, {2, 2}}, {.overwrite = true});
  write_npy_slice(temporary, 0, 1, Tensor::of<float>({1, 2}, {3, 4}));
  write_npy_slice(temporary, 0, 0, Tensor::of<float>({1, 2}, {1, 2}));
  commit_npy(temporary, "parts.npy", {.overwrite = true});
  std::cout << load_npy("parts.npy").view() << '\n';
  // [[1 2]
  //  [3 4]]
}

}  // namespace

void io_examples() {
  example_save_npy();
  example_load_npy();
  example_save_npz();
  example_load_npz();
  example_save_safetensors();
  example_load_safetensors();
  example_npy_shape();
  example_load_npy_slice();
  example_begin_npy();
}
