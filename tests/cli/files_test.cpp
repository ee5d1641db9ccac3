// Which files are written, and which are left unchanged.
#include <fstream>
#include <sstream>

#include "cli_support.h"

namespace headway::test {
namespace {

class Files : public CommandTest {
 protected:
  Files() {
    x_ = save_random("x.npy", {1, 2, 8, 6}, 1);
    out_ = Tensor(x_.sizes());
    attention(x_, x_, x_, out_);
  }

  Finished attend(const Arguments& more) const {
    Arguments arguments = {"attend", "x.npy", "x.npy", "x.npy"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  }

  void write_text(const std::string& name, const std::string& text) const { std::ofstream(file(name)) << text; }
  std::string text_of(const std::string& name) const {
    std::ostringstream stream;
    stream << std::ifstream(file(name)).rdbuf();
    return stream.str();
  }

  Tensor x_, out_;
};

TEST_F(Files, an_existing_file_stays_without_force) {
  write_text("out.npy", "precious");
  expect_failure(attend({"-o", "out.npy"}), 1, "headway attend", "out.npy exists; --force replaces it");
  EXPECT_EQ(text_of("out.npy"), "precious");
  EXPECT_EQ(attend({"-o", "out.npy", "--force"}).code, 0);
  EXPECT_TRUE(same_bits(load_npy(file("out.npy")), out_));
}

TEST_F(Files, may_be_npz) {
  EXPECT_EQ(attend({"-o", "out.npz"}).code, 0);
  EXPECT_TRUE(same_bits(load_npz(file("out.npz")).at("out"), out_));
}

TEST_F(Files, an_existing_second_output_is_found_before_the_work) {
  write_text("w.npy", "precious");
  expect_failure(attend({"-o", "out.npy", "--weights", "w.npy"}), 1, "headway attend", "w.npy exists");
  EXPECT_EQ(files(), (std::set<std::string>{"w.npy", "x.npy"}));
  // Inputs that cannot be read prove that nobody tried to.
  expect_failure(run({"attend", "no.npy", "no.npy", "no.npy", "-o", "w.npy"}), 1, "headway attend", "w.npy exists");
}

TEST_F(Files, other_commands_do_not_overwrite_either) {
  write_text("taken.npy", "precious");
  write_text("taken.safetensors", "precious");
  expect_failure(run({"random", "2,2", "-o", "taken.npy"}), 1, "headway random", "--force");
  expect_failure(run({"layer-init", "--model-dim", "4", "--heads", "2", "-o", "taken.safetensors"}), 1,
                 "headway layer-init", "--force");
  EXPECT_EQ(text_of("taken.npy") + text_of("taken.safetensors"), "preciousprecious");
  EXPECT_EQ(run({"layer-init", "--model-dim", "4", "--heads", "2", "-o", "taken.safetensors", "--force"}).code, 0);
  EXPECT_EQ(MultiHeadAttention::load(file("taken.safetensors")).config().model_dim, 4);
}

TEST_F(Files, outputs_must_differ_from_each_other_and_from_the_inputs) {
  expect_failure(attend({"-o", "out.npy", "--lse", "./out.npy"}), 2, "headway attend",
                 "-o and --lse name the same file");
  expect_failure(attend({"-o", "x.npy", "--force"}), 2, "headway attend", "-o would overwrite an input file");
  save_npy(file("bias.npy"), Tensor({8, 8}));
  std::filesystem::create_symlink("bias.npy", file("link.npy"));
  expect_failure(attend({"-o", "link.npy", "--bias", "bias.npy", "--force"}), 2, "headway attend",
                 "would overwrite an input file");
  save_safetensors(file("many.safetensors"), {{"x", x_}});
  expect_failure(run({"attend", "many.safetensors:x", "x.npy", "x.npy", "-o", "many.safetensors", "--force"}), 2,
                 "headway attend", "would overwrite an input file");
  EXPECT_EQ(files(), (std::set<std::string>{"bias.npy", "link.npy", "many.safetensors", "x.npy"}));
  EXPECT_TRUE(same_bits(load_npy(file("x.npy")), x_));
}

TEST_F(Files, of_other_formats_are_not_written) {
  for (const char* name : {"out", "out.txt", "out.npy.gz", ""}) {
    expect_failure(attend({"-o", name}), 2, "headway attend",
                   "expected a file name that ends in .npy, .npz or .safetensors");
  }
  expect_failure(attend({"-o", "out.npy", "--lse", ""}), 2, "headway attend", "--lse: expected a file name");
  EXPECT_EQ(files(), std::set<std::string>{"x.npy"});
}

TEST_F(Files, a_folder_that_is_not_there_is_found_before_the_work) {
  std::filesystem::create_directory(file("folder.npy"));
  expect_failure(attend({"-o", "no/out.npy"}), 1, "headway attend", "there is no folder no");
  expect_failure(attend({"-o", "folder.npy", "--force"}), 1, "headway attend", "found a folder");
}

TEST_F(Files, safetensors_hold_one_tensor_by_its_name) {
  ASSERT_EQ(attend({"-o", "out.safetensors", "--weights", "w.safetensors"}).code, 0);
  EXPECT_TRUE(same_bits(load_safetensors(file("out.safetensors")).tensors.at("out"), out_));
  EXPECT_EQ(load_safetensors(file("w.safetensors")).tensors.at("weights").sizes(), (Dims{1, 2, 8, 8}));
  // One tensor needs no name.
  EXPECT_EQ(run({"attend", "out.safetensors", "x.npy", "x.npy", "-o", "again.npy"}).code, 0);
}

TEST_F(Files, bf16_is_written_as_safetensors_and_refused_as_npy_before_the_work) {
  const Tensor x = random_tensor({2, 4, 6}, 1, DType::bf16);
  save_safetensors(file("b.safetensors"), {{"x", x}});
  const Arguments attend_b = {"attend", "b.safetensors:x", "b.safetensors:x", "b.safetensors:x", "-o"};
  const auto with = [&](const Arguments& more) {
    Arguments arguments = attend_b;
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  };
  expect_failure(with({"out.npy"}), 2, "headway attend", ".npy has no bf16, use .safetensors");
  expect_failure(with({"out.safetensors", "--weights", "w.npy"}), 2, "headway attend", "--weights: .npy has no bf16");
  ASSERT_EQ(with({"out.safetensors", "--lse", "lse.npy"}).code, 0);
  Tensor expected(x.sizes(), DType::bf16);
  attention(x, x, x, expected);
  EXPECT_TRUE(same_bits(load_safetensors(file("out.safetensors")).tensors.at("out"), expected));
  EXPECT_EQ(load_npy(file("lse.npy")).dtype(), DType::f32);
}

TEST_F(Files, when_one_write_fails_the_new_files_of_the_run_go_and_older_ones_stay) {
  // out has 384 bytes after its header, the weights 512: the limit lets one through.
  constexpr std::uint64_t limit = 128 + 400;
  const Arguments arguments = {"attend", "x.npy", "x.npy", "x.npy", "-o", "out.npy", "--weights", "w.npy"};
  expect_failure(run_with_file_limit(arguments, limit), 1, "headway attend", "w.npy: cannot write");
  EXPECT_EQ(files(), std::set<std::string>{"x.npy"});

  write_text("w.npy", "precious");
  Arguments forced = arguments;
  forced.push_back("--force");
  expect_failure(run_with_file_limit(forced, limit), 1, "headway attend", "w.npy: cannot write");
  EXPECT_EQ(text_of("w.npy"), "precious");
  EXPECT_EQ(files(), (std::set<std::string>{"w.npy", "x.npy"}));
}

TEST_F(Files, names_may_hold_spaces_and_dashes) {
  ASSERT_EQ(attend({"-o", "-my out.npy"}).code, 0);
  EXPECT_TRUE(same_bits(load_npy(file("-my out.npy")), out_));
  EXPECT_EQ(run({"attend", "-o", "again.npy", "--", "-my out.npy", "x.npy", "x.npy"}).code, 0);
}

}  // namespace
}  // namespace headway::test
