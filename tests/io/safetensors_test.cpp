// .safetensors files: what the safetensors package writes, what we write, and what neither should.
#include <gtest/gtest.h>

#include "files.h"
#include "foreign_files.h"

namespace headway {
namespace {

std::string file_with(const std::string& header, const std::string& data = "") {
  return little_endian(std::uint64_t{header.size()}) + header + data;
}

std::string one_tensor(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return "{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}

void expect_invalid(const std::string& content, std::initializer_list<std::string> parts) {
  const TestFolder folder;
  const auto path = put(folder / "x.safetensors", content);
  const SmallMemory small;
  expect_file_error([&] { load_safetensors(path); }, {"load_safetensors: " + path.string() + ": "});
  expect_file_error([&] { load_safetensors(path); }, parts);
}

TEST(Safetensors, every_type_shape_and_stride_comes_back_as_it_was_written) {
  const TestFolder folder;
  NamedTensors tensors;
  for (const DType dtype : all_types()) {
    for (const Dims& sizes : {Dims{}, Dims{5}, Dims{2, 3, 4}, Dims{3, 0, 2}}) {
      tensors.emplace(std::string(name(dtype)) + std::to_string(tensors.size()), random_bits(sizes, dtype));
    }
  }
  NamedViews views(tensors.begin(), tensors.end());
  views["transposed"] = tensors.at("f322").view().transpose(0, 2).flip(1);
  views["repeated"] = tensors.at("bf168").view().expand({2, 3});
  const std::map<std::string, std::string> metadata{{"format", "pt"}, {"odd \"key\"\n", "\xc3\xa9"}, {"", ""}};
  save_safetensors(folder / "x.safetensors", views, metadata);
  const SafetensorsFile loaded = load_safetensors(folder / "x.safetensors");
  EXPECT_EQ(loaded.metadata, metadata);
  ASSERT_EQ(loaded.tensors.size(), views.size());
  for (const auto& [key, view] : views) {
    EXPECT_TRUE(same(loaded.tensors.at(key), view)) << key;
  }
}

TEST(Safetensors, a_file_may_hold_no_tensor) {
  const TestFolder folder;
  save_safetensors(folder / "x.safetensors", {});
  EXPECT_EQ(content_of(folder / "x.safetensors"), file_with("{}      "));
  EXPECT_TRUE(load_safetensors(folder / "x.safetensors").tensors.empty());
}

TEST(Safetensors, every_tensor_starts_at_a_multiple_of_its_elements) {
  const TestFolder folder;
  const Tensor bools({3}, DType::b8);
  const Tensor halves({3}, DType::bf16);
  const Tensor doubles({1}, DType::f64);
  save_safetensors(folder / "x.safetensors", {{"a", bools}, {"b", halves}, {"c", doubles}}, {{"k", "v"}});
  const std::string content = content_of(folder / "x.safetensors");
  EXPECT_EQ((content.size() - 3 - 6 - 8) % 8, 0u);
  EXPECT_NE(content.find("\"c\":" + one_tensor("F64", "[1]", "[0,8]")), std::string::npos) << content;
  EXPECT_NE(content.find("\"b\":" + one_tensor("BF16", "[3]", "[8,14]")), std::string::npos) << content;
  EXPECT_NE(content.find("\"a\":" + one_tensor("BOOL", "[3]", "[14,17]")), std::string::npos) << content;
}

TEST(Safetensors, files_of_the_package_are_read) {
  const TestFolder folder;
  const SafetensorsFile file = load_safetensors(put(folder / "x.safetensors", foreign::safetensors_some));
  EXPECT_EQ(file.metadata, (std::map<std::string, std::string>{{"format", "np"}, {"\xc3\xa9", "a \"quoted\" text"}}));
  ASSERT_EQ(file.tensors.size(), 6u);
  EXPECT_TRUE(same(file.tensors.at("f32"), Tensor::of<float>({2, 3}, {0, 1, 2, 3, 4, 5})));
  EXPECT_TRUE(same(file.tensors.at("f64"), Tensor::of<double>({}, {2.5})));
  EXPECT_TRUE(same(file.tensors.at("f16"), Tensor::of<float16>({2}, {float16(1.0f), float16(-2.0f)})));
  EXPECT_TRUE(same(file.tensors.at("bool"), Tensor::of<bool>({3}, {true, false, true})));
  EXPECT_TRUE(same(file.tensors.at("i32"), Tensor::of<std::int32_t>({2, 1}, {-1, 2})));
  EXPECT_TRUE(same(file.tensors.at("i64"), Tensor({0, 4}, DType::i64)));
}

TEST(Safetensors, a_truncated_file_is_an_error_that_names_the_sizes) {
  const std::string whole = file_with("{\"x\":" + one_tensor("F32", "[2]", "[0,8]") + "}", std::string(8, '\0'));
  expect_invalid("", {"expected at least 8 bytes, found 0"});
  expect_invalid(whole.substr(0, 7), {"expected at least 8 bytes, found 7"});
  expect_invalid(whole.substr(0, 20), {"expected a header of 54 bytes, found 12"});
  expect_invalid(whole.substr(0, whole.size() - 1), {"expected 8 bytes of data after the header, found 7"});
}

TEST(Safetensors, bytes_after_the_last_tensor_are_an_error) {
  expect_invalid(file_with("{\"x\":" + one_tensor("F32", "[2]", "[0,8]") + "}", std::string(9, '\0')),
                 {"expected 8 bytes of data after the header, found 9"});
  expect_invalid(file_with("{}", "x"), {"expected 0 bytes of data after the header, found 1"});
}

TEST(Safetensors, tensors_that_overlap_or_leave_holes_are_refused) {
  const std::string first = "{\"a\":" + one_tensor("F32", "[2]", "[0,8]") + ",\"b\":";
  expect_invalid(file_with(first + one_tensor("F32", "[2]", "[4,12]") + "}", std::string(12, '\0')),
                 {"tensor \"b\"", "offset 8, found 4: tensors overlap"});
  expect_invalid(file_with(first + one_tensor("F32", "[2]", "[0,8]") + "}", std::string(8, '\0')), {"tensors overlap"});
  expect_invalid(file_with(first + one_tensor("F32", "[2]", "[12,20]") + "}", std::string(20, '\0')),
                 {"tensor \"b\"", "offset 8, found 12: a hole before it"});
  expect_invalid(file_with("{\"a\":" + one_tensor("F32", "[1]", "[4,8]") + "}", std::string(8, '\0')), {"a hole"});
}

TEST(Safetensors, offsets_that_do_not_match_the_shape_are_refused) {
  const auto refused = [](const std::string& offsets) {
    expect_invalid(file_with("{\"x\":" + one_tensor("F32", "[2]", offsets) + "}", std::string(8, '\0')),
                   {"tensor \"x\"", "expected 8 bytes (f32 of shape (2,)), found data_offsets"});
  };
  refused("[0,4]");
  refused("[8,0]");
  refused("[18446744073709551608,0]");
  refused("[0,18446744073709551615]");
}

TEST(Safetensors, claims_larger_than_the_file_are_refused_before_memory_is_asked_for) {
  expect_invalid(little_endian(std::uint64_t{0xffffffffffffffff}) + "{}",
                 {"at most 104857600", "18446744073709551615"});
  expect_invalid(little_endian(std::uint64_t{100'000'000}) + "{}", {"expected a header of 100000000 bytes, found 2"});
  expect_invalid(file_with("{\"x\":" + one_tensor("F32", "[4294967296,4294967296]", "[0,0]") + "}"), {"2^63 bytes"});
  expect_invalid(file_with("{\"x\":" + one_tensor("I64", "[10000000000]", "[0,80000000000]") + "}"),
                 {"expected 80000000000 bytes of data after the header, found 0"});
  expect_invalid(file_with("{\"x\":" + one_tensor("I64", "[1000000000000]", "[0,8000000000000]") + "}"),
                 {"at most 1099511627776 bytes for one tensor"});
}

TEST(Safetensors, shapes_that_no_tensor_has_are_refused) {
  const auto refused = [](const std::string& shape, const std::string& found) {
    expect_invalid(file_with("{\"x\":" + one_tensor("F32", shape, "[0,4]") + "}", std::string(4, '\0')),
                   {"tensor \"x\"", found});
  };
  refused("[-1]", "found a negative number");
  refused("[1.0]", "found a number that is no 64-bit integer");
  refused("[99999999999999999999999]", "found a number that is no 64-bit integer");
  refused("[18446744073709551615]", "sizes below 2^63");
  refused("[1,1,1,1,1,1,1,1,1]", "at most 8 dimensions");
  refused("[[1]]", "found an array");
  refused("1", "found a number");
  refused("{}", "found an object");
}

TEST(Safetensors, repeated_names_are_refused) {
  const std::string tensor = one_tensor("F32", "[0]", "[0,0]");
  expect_invalid(file_with("{\"x\":" + tensor + ",\"x\":" + tensor + "}"), {"each name once, found \"x\" again"});
  expect_invalid(file_with("{\"__metadata__\":{},\"__metadata__\":{}}"), {"each name once"});
  expect_invalid(file_with("{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}"), {"each metadata key once"});
  expect_invalid(file_with("{\"x\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}"), {"once each", "\"dtype\""});
}

TEST(Safetensors, types_that_no_tensor_has_are_named) {
  for (const std::string dtype : {"U8", "F8_E5M2", "C64", "f32", ""}) {
    expect_invalid(file_with("{\"x\":" + one_tensor(dtype, "[0]", "[0,0]") + "}"),
                   {"F32, F64, BF16, F16, BOOL, I32, I64, I8, F8_E4M3, found \"" + dtype + "\""});
  }
}

TEST(Safetensors, headers_that_are_not_what_the_format_says_are_refused) {
  expect_invalid(file_with(""), {"start with '{'"});
  expect_invalid(file_with(" {}"), {"start with '{'"});
  expect_invalid(file_with("[]"), {"start with '{'"});
  expect_invalid(file_with("{"), {"expected JSON", "byte"});
  expect_invalid(file_with("{} {}"), {"expected JSON"});
  expect_invalid(file_with("{}" + std::string(3, '\0')), {"a zero byte at its byte 2"});
  expect_invalid(file_with("{\"\xff\":{}}"), {"expected JSON"});
  expect_invalid(file_with("{\"x\":1}"), {"\"x\" to be an object, found a number"});
  expect_invalid(file_with("{\"x\":null}"), {"found null"});
  expect_invalid(file_with("{\"x\":{}}"), {"found no dtype"});
  expect_invalid(file_with("{\"x\":{\"dtype\":\"F32\"}}"), {"found no shape"});
  expect_invalid(file_with("{\"x\":{\"dtype\":\"F32\",\"shape\":[]}}"), {"found no data_offsets"});
  expect_invalid(file_with("{\"x\":{\"dtype\":true}}"), {"dtype to be a string, found a boolean"});
  expect_invalid(file_with("{\"x\":{\"more\":1}}"), {"another \"more\""});
  expect_invalid(file_with("{\"x\":" + one_tensor("F32", "[]", "[0]") + "}"), {"two data_offsets, found 1"});
  expect_invalid(file_with("{\"x\":" + one_tensor("F32", "[]", "[0,4,8]") + "}"), {"two data_offsets, found more"});
  expect_invalid(file_with("{\"__metadata__\":{\"k\":1}}"), {"metadata to be texts by name, found a number"});
  expect_invalid(file_with("{\"__metadata__\":{\"k\":{}}}"), {"metadata to be texts by name, found an object"});
  expect_invalid(file_with("{\"__metadata__\":[]}"), {"\"__metadata__\" to be an object, found an array"});
}

TEST(Safetensors, deep_nesting_is_refused_at_once) {
  expect_invalid(file_with("{\"x\":" + std::string(1'000'000, '[')), {"found an array"});
  std::string objects;
  for (int i = 0; i < 100'000; ++i) {
    objects += "{\"x\":";
  }
  expect_invalid(file_with(objects), {"another \"x\""});
}

TEST(Safetensors, a_file_of_another_format_is_called_by_its_name) {
  const TestFolder folder;
  save_npy(folder / "x.npy", Tensor({3}));
  expect_file_error([&] { load_safetensors(folder / "x.npy"); }, {"expected a .safetensors file, found a .npy array"});
  const std::string npz("PK\x03\x04\x14\0\0\0\0\0", 10);
  expect_file_error([&] { load_safetensors(put(folder / "x.npz", npz)); },
                    {"expected a .safetensors file, found a .npz file"});
}

TEST(Safetensors, limits_of_the_caller_are_kept) {
  const TestFolder folder;
  const auto path = put(folder / "x", file_with("{\"x\":" + one_tensor("I64", "[]", "[0,8]") + "}", "12345678"));
  const std::uint64_t header = std::filesystem::file_size(path) - 16;
  EXPECT_NO_THROW(load_safetensors(path, {.header_bytes = header, .tensor_bytes = 8}));
  expect_file_error([&] { load_safetensors(path, {.header_bytes = header - 1}); }, {"header of at most"});
  expect_file_error([&] { load_safetensors(path, {.tensor_bytes = 7}); }, {"at most 7 bytes for one tensor"});
}

TEST(Safetensors, names_that_the_format_cannot_hold_are_refused_before_a_file_is_made) {
  const TestFolder folder;
  const Tensor tensor({1});
  EXPECT_THROW(save_safetensors(folder / "x", {{"__metadata__", tensor}}), InvalidArgument);
  EXPECT_THROW(save_safetensors(folder / "x", {{"\xff", tensor}}), InvalidArgument);
  EXPECT_THROW(save_safetensors(folder / "x", {}, {{"k", "\xed\xa0\x80"}}), InvalidArgument);
  const ConstTensorView elsewhere(tensor.data(), DType::f32, {1}, Device{DeviceType::cuda, 0});
  EXPECT_THROW(save_safetensors(folder / "x", {{"a", elsewhere}}), Unsupported);
  EXPECT_EQ(folder.files(), 0u);
}

}  // namespace
}  // namespace headway
