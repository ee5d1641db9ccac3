// Uses one thing of each part of the library through its installed headers: attention, explain, the layer, files.
#include <headway/headway.h>

#include <iostream>

int main() {
  using namespace headway;

  // Scores of 0 attend to both keys alike: the mean of the values.
  const Tensor query({1, 1, 1, 2});
  const Tensor key({1, 1, 2, 2});
  const Tensor value = Tensor::of<float>({1, 1, 2, 1}, {1, 3});
  Tensor out({1, 1, 1, 1});
  attention(query, key, value, out);
  std::cout << "mean " << out.at<float>({0, 0, 0, 0}) << '\n';
  const Plan plan = explain(query, key, value, {.engine = Engine::reference});
  std::cout << "explains " << plan.operation << " on " << name(plan.engine) << '\n';

  MultiHeadAttention layer({.model_dim = 4, .heads = 2});
  const Tensor x({1, 3, 4});
  std::cout << "layer gives " << layer.forward(x, x, x).sizes() << '\n';

  // A missing file is an Error in every build, also in one that was built without this format.
  for (const auto& load : {+[] { load_npy("missing.npy"); }, +[] { load_npz("missing.npz"); },
                           +[] { load_safetensors("missing.safetensors"); }}) {
    try {
      load();
      std::cout << "loaded a missing file\n";
    } catch (const Error&) {
    }
  }
  std::cout << "version " << version << '\n';
}
