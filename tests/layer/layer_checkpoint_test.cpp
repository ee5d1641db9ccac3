// Saving and loading: a loaded layer is the saved one, and an inconsistent file is refused with the name of the fault.
#include <unistd.h>

#include <filesystem>

#include "layer_support.h"

namespace headway::test {
namespace {

class LayerCheckpoint : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ =
        std::filesystem::temp_directory_path() / (std::string("headway_") + test->name() + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path path(const std::string& name = "layer.safetensors") const { return folder_ / name; }

  // The file of a small layer, as parts that a test may change before writing them again.
  SafetensorsFile parts(bool bias = true) const {
    random_layer({.model_dim = 6, .heads = 2, .bias = bias}).save(path(), true);
    return load_safetensors(path());
  }

  std::string load_error(const SafetensorsFile& file) const {
    save_safetensors(path("changed"), {file.tensors.begin(), file.tensors.end()}, file.metadata, {.overwrite = true});
    const std::string prefix = "MultiHeadAttention::load: " + path("changed").string() + ": ";
    const std::string found = error_text<FileError>([&] { MultiHeadAttention::load(path("changed")); });
    return found.starts_with(prefix) ? found.substr(prefix.size()) : found;
  }

  std::string load_error_with(const std::string& key, const std::string& value) const {
    SafetensorsFile file = parts();
    file.metadata[key] = value;
    return load_error(file);
  }

 private:
  std::filesystem::path folder_;
};

TEST_F(LayerCheckpoint, gives_back_config_parameters_and_results) {
  for (const DType dtype : float_types) {
    for (auto [name, config] : config_zoo(dtype)) {
      config.seed = 0xfedcba9876543210u;
      config.initializer = Initializer::torch_linear;
      const MultiHeadAttention saved = random_layer(config);
      saved.save(path(), true);
      MultiHeadAttention loaded = MultiHeadAttention::load(path());
      EXPECT_EQ(loaded.config(), saved.config()) << name;
      ASSERT_EQ(loaded.parameters().size(), saved.parameters().size());
      for (const auto& [parameter, view] : saved.parameters()) {
        EXPECT_TRUE(same_bits(loaded.parameter(parameter), view)) << parameter;
      }
      const Inputs in = random_inputs(saved.config(), 2, 3, 5);
      EXPECT_TRUE(
          same_bits(loaded.forward(in.queries, in.keys, in.values), saved.infer(in.queries, in.keys, in.values)));
      EXPECT_NO_THROW(loaded.backward(random_tensor({2, 3, config.model_dim}, dtype, 8)));
    }
  }
}

TEST_F(LayerCheckpoint, keeps_parameters_that_are_not_finite) {
  MultiHeadAttention layer({.model_dim = 4});
  layer.parameter("W_q").at<float>({0, 0}) = std::numeric_limits<float>::quiet_NaN();
  layer.parameter("W_q").at<float>({0, 1}) = -std::numeric_limits<float>::infinity();
  layer.save(path());
  EXPECT_TRUE(same_bits(MultiHeadAttention::load(path()).parameter("W_q"), layer.parameter("W_q")));
}

TEST_F(LayerCheckpoint, does_not_replace_a_file_unless_told_to) {
  const MultiHeadAttention layer({.model_dim = 4}), other({.model_dim = 6});
  layer.save(path());
  EXPECT_THROW(other.save(path()), FileError);
  EXPECT_EQ(MultiHeadAttention::load(path()).config().model_dim, 4);
  other.save(path(), true);
  EXPECT_EQ(MultiHeadAttention::load(path()).config().model_dim, 6);
}

TEST_F(LayerCheckpoint, a_missing_file_is_a_file_error) {
  EXPECT_THROW(MultiHeadAttention::load(path("nowhere")), FileError);
}

TEST_F(LayerCheckpoint, unchanged_parts_load) { EXPECT_EQ(load_error(parts()), "no error"); }

TEST_F(LayerCheckpoint, foreign_metadata_is_ignored) { EXPECT_EQ(load_error_with("format", "pt"), "no error"); }

TEST_F(LayerCheckpoint, a_missing_parameter_is_named) {
  SafetensorsFile file = parts();
  file.tensors.erase("b_v");
  EXPECT_EQ(load_error(file), "expected a tensor b_v, found none");
}

TEST_F(LayerCheckpoint, an_unexpected_tensor_is_named) {
  SafetensorsFile file = parts();
  file.tensors.emplace("W_x", Tensor({2}));
  EXPECT_EQ(load_error(file), "found an unexpected tensor \"W_x\"");
  file = parts();
  file.metadata["bias"] = "false";
  EXPECT_EQ(load_error(file), "found an unexpected tensor \"b_k\"");
}

TEST_F(LayerCheckpoint, a_parameter_of_another_shape_is_named) {
  SafetensorsFile file = parts();
  file.tensors.at("W_o") = Tensor({6, 5});
  EXPECT_EQ(load_error(file), "W_o has shape (6, 5), expected (6, 6)");
  file = parts();
  file.tensors.at("b_q") = Tensor({6, 1});
  EXPECT_EQ(load_error(file), "b_q has shape (6, 1), expected (6,)");
}

TEST_F(LayerCheckpoint, a_parameter_of_another_type_is_named) {
  SafetensorsFile file = parts();
  file.tensors.at("W_k") = Tensor({6, 6}, DType::f64);
  EXPECT_EQ(load_error(file), "W_k has type f64, expected f32");
  file.tensors.at("W_k") = Tensor({6, 6}, DType::i32);
  EXPECT_EQ(load_error(file), "W_k has type i32, expected f32");
}

TEST_F(LayerCheckpoint, every_part_of_the_config_must_be_there) {
  for (const char* key : {"layer", "model_dim", "heads", "kv_heads", "head_dim", "key_dim", "value_dim", "bias",
                          "dtype", "initializer", "seed"}) {
    SafetensorsFile file = parts();
    ASSERT_EQ(file.metadata.erase(key), 1u) << key;
    EXPECT_EQ(load_error(file), std::string("expected the metadata to say ") + key + ", found nothing");
  }
}

TEST_F(LayerCheckpoint, numbers_that_are_none_are_refused) {
  for (const char* value : {"", " 6", "6 ", "+6", "0x6", "6.0", "six", "99999999999999999999", "6\n"}) {
    const std::string found = load_error_with("model_dim", value);
    EXPECT_TRUE(found.starts_with("expected model_dim to be an integer, found \"")) << found;
  }
  EXPECT_EQ(load_error_with("seed", "-1"), "expected seed to be an integer, found \"-1\"");
  EXPECT_EQ(load_error_with("bias", "1"), "expected bias to be one of false, true, found \"1\"");
  EXPECT_EQ(load_error_with("dtype", "i32"), "expected dtype to be one of f32, f64, bf16, f16, found \"i32\"");
  EXPECT_EQ(load_error_with("layer", "Dense"), "expected layer to be headway.MultiHeadAttention, found \"Dense\"");
  EXPECT_EQ(load_error_with("initializer", std::string(1000, 'x')),
            "expected initializer to be one of xavier_uniform, torch_linear, uniform_01, found \"" +
                std::string(60, 'x') + "...\"");
}

TEST_F(LayerCheckpoint, a_config_that_lies_about_sizes_is_refused_before_memory_is_asked_for) {
  EXPECT_EQ(load_error_with("model_dim", "1099511627776"), "W_q has shape (6, 6), expected (1099511627776, 6)");
  EXPECT_EQ(load_error_with("head_dim", "9223372036854775807"),
            "MultiHeadAttention: heads 2 times head_dim 9223372036854775807 is more than 2^63");
  EXPECT_EQ(load_error_with("model_dim", "4611686018427387904"),
            "MultiHeadAttention: W_q of shape (4611686018427387904, 6) has more than 2^63 bytes");
}

TEST_F(LayerCheckpoint, a_config_that_contradicts_itself_is_refused) {
  EXPECT_EQ(load_error_with("heads", "0"), "MultiHeadAttention: expected heads of 1 or more, found 0");
  EXPECT_EQ(load_error_with("kv_heads", "3"), "MultiHeadAttention: heads 2 is not divisible by kv_heads 3");
  EXPECT_EQ(load_error_with("key_dim", "-6"), "MultiHeadAttention: expected key_dim of 0 or more, found -6");
  EXPECT_EQ(load_error_with("key_dim", "0"), "expected the metadata to give every size, found a 0");
}

TEST_F(LayerCheckpoint, a_file_that_is_cut_short_is_refused_at_every_length) {
  random_layer({.model_dim = 2}).save(path());
  const auto size = std::filesystem::file_size(path());
  for (std::uintmax_t length = 0; length < size; length += 7) {
    std::filesystem::copy_file(path(), path("short"), std::filesystem::copy_options::overwrite_existing);
    std::filesystem::resize_file(path("short"), length);
    EXPECT_THROW(MultiHeadAttention::load(path("short")), FileError) << length;
  }
}

}  // namespace
}  // namespace headway::test
