#include "examples.h"

using namespace headway;

namespace {

void example_Dims() {
  Dims sizes{2, 3};
  sizes.push_back(4);
  std::cout << sizes << ' ' << sizes.size() << ' ' << sizes.back() << '\n';  // (2, 3, 4) 3 4
  std::cout << (sizes == Dims{2, 3, 4}) << ' ' << sizes.empty() << '\n';     // true false
  std::cout << sizes.at(0) << ' ' << sizes.at(-1) << '\n';                   // 2 4
}

void example_checked_elements() {
  std::cout << checked_elements({2, 3, 4}, DType::f32) << '\n';  // 24
  try {
    checked_elements({std::int64_t{1} << 40, std::int64_t{1} << 40}, DType::f32);
  } catch (const InvalidArgument&) {
    std::cout << "too many bytes\n";  // too many bytes
  }
}

void example_contiguous_strides() { std::cout << contiguous_strides({2, 3, 4}) << '\n'; }  // (12, 4, 1)

void example_Device() {
  std::cout << Device{} << ' ' << Device{DeviceType::cuda, 1} << '\n';  // cpu cuda:1
}

void example_BasicTensorView() {
  std::vector<float> memory(2 * 3 * 4);
  const TensorView view(memory, {2, 3, 4});  // borrows: `memory` must stay
  view.at<float>({1, 2, 3}) = 7;
  std::cout << view.rank() << ' ' << view.size(1) << ' ' << view.stride(1) << '\n';             // 3 3 4
  std::cout << view.transpose(0, 2).sizes() << ' ' << view.permute({1, 0, 2}).sizes() << '\n';  // (4, 3, 2) (3, 2, 4)
  std::cout << view.select(0, 1).sizes() << ' ' << view.slice(1, 0, 2).sizes() << '\n';         // (3, 4) (2, 2, 4)
  std::cout << view.flip(2).at<float>({1, 2, 0}) << '\n';                                       // 7
  std::cout << view.unsqueeze(0).sizes() << '\n';                                               // (1, 2, 3, 4)
  std::cout << view.unflatten(2, {2, 2}).sizes() << '\n';                                       // (2, 3, 2, 2)
  const ConstTensorView row(memory.data(), {4});      // a pointer says nothing about its length
  std::cout << row.expand({3, 4}).strides() << '\n';  // (0, 1)
  std::cout << view.elements() << ' ' << view.is_contiguous() << ' ' << view.transpose(0, 1).is_contiguous()
            << '\n';  // 24 true false
  std::cout << (view.data() == view.as<float>()) << ' ' << view.dtype() << ' ' << view.device()
            << '\n';  // true f32 cpu
}

void example_Tensor() {
  Tensor zeros({2, 3});
  Tensor x = Tensor::of<float>({2, 2}, {1, 2, 3, 4});
  std::cout << x.view() << '\n';
  // [[1 2]
  //  [3 4]]
  const Tensor copy = x.clone();  // copying is spelled out; moving is free
  x.at<float>({0, 0}) = 9;
  std::cout << copy.at<float>({0, 0}) << ' ' << x.as<float>()[0] << '\n';  // 1 9
  const Tensor later = Tensor::uninitialized({4}, DType::f64);             // to be written before it is read
  std::cout << later.dtype() << ' ' << later.device() << ' ' << later.rank() << '\n';     // f64 cpu 1
  std::cout << zeros.elements() << ' ' << zeros.size(1) << ' ' << zeros.sizes() << '\n';  // 6 3 (2, 3)
  std::cout << (zeros.data() != nullptr) << '\n';                                         // true
}

void example_copy() {
  const Tensor from = Tensor::of<double>({3}, {1.5, 2.5, -3.5});
  Tensor to({3}, DType::i32);
  copy(from, to);                  // converts; floating to integer truncates
  std::cout << to.view() << '\n';  // [ 1  2 -3]
}

void example_convert() {
  const Tensor halves = convert(Tensor::of<float>({2}, {1, 1.001f}), DType::bf16);
  std::cout << halves.view() << '\n';  // [1 1]
}

void example_copied_to() {
  const Tensor x = Tensor::of<float>({2, 2}, {1, 2, 3, 4});
  const Tensor transposed = copied_to(x.view().transpose(0, 1), Device{});  // or {DeviceType::cuda, 0}
  std::cout << transposed.as<float>()[1] << '\n';                           // 3
}

}  // namespace

void tensor_examples() {
  example_Dims();
  example_checked_elements();
  example_contiguous_strides();
  example_Device();
  example_BasicTensorView();
  example_Tensor();
  example_copy();
  example_convert();
  example_copied_to();
}
