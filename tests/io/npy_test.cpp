// .npy files: what NumPy writes, what we write, and what neither should.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "files.h"
#include "foreign_files.h"

namespace headway {
namespace {

// A version 1.0 file with this header and `data` after it.
std::string npy_with(const std::string& header, const std::string& data = "") {
  return "\x93NUMPY" + std::string("\1\0", 2) + little_endian(static_cast<std::uint16_t>(header.size())) + header +
         data;
}

std::string npy_of_shape(const std::string& shape, const std::string& data = "") {
  return npy_with("{'descr': '<f4', 'fortran_order': False, 'shape': " + shape + "}\n", data);
}

void expect_bad_npy(const std::string& content, std::initializer_list<std::string> parts) {
  const TestFolder folder;
  const auto path = put(folder / "x.npy", content);
  const SmallMemory small;
  expect_file_error([&] { load_npy(path); }, {"load_npy: " + path.string() + ": "});
  expect_file_error([&] { load_npy(path); }, parts);
}

TEST(Npy, every_type_comes_back_as_it_was_written) {
  const TestFolder folder;
  for (const DType dtype : all_types()) {
    if (dtype == DType::bf16) {
      continue;
    }
    for (const Dims& sizes : {Dims{}, Dims{5}, Dims{2, 3, 4}, Dims{3, 0, 2}, Dims{1, 1, 1, 1, 1, 1, 1, 2}}) {
      const Tensor tensor = random_bits(sizes, dtype);
      save_npy(folder / "x.npy", tensor, {.overwrite = true});
      EXPECT_TRUE(same(load_npy(folder / "x.npy"), tensor)) << dtype << " " << sizes;
    }
  }
}

TEST(Npy, any_strided_view_can_be_written) {
  const TestFolder folder;
  const Tensor tensor = random_bits({3, 4, 5}, DType::f32);
  const ConstTensorView whole = tensor;
  for (const ConstTensorView& view :
       {whole.transpose(0, 2), whole.flip(1).flip(2), whole.slice(1, 1, 3), whole.select(2, 4),
        whole.unsqueeze(1).expand({3, 6, 4, 5}), whole.slice(0, 1, 1), whole.select(0, 1).select(0, 1).select(0, 1)}) {
    save_npy(folder / "x.npy", view, {.overwrite = true});
    EXPECT_TRUE(same(load_npy(folder / "x.npy"), view)) << view.sizes() << " " << view.strides();
  }
}

TEST(Npy, a_strided_view_larger_than_the_write_buffer_comes_back_whole) {
  const TestFolder folder;
  const Tensor tensor = random_bits({701, 503}, DType::f64);
  const ConstTensorView view = tensor.view().transpose(0, 1);
  save_npy(folder / "x.npy", view);
  EXPECT_TRUE(same(load_npy(folder / "x.npy"), view));
}

TEST(Npy, bf16_is_refused_with_the_way_out) {
  const TestFolder folder;
  try {
    save_npy(folder / "x.npy", Tensor({2}, DType::bf16));
    FAIL() << "no error";
  } catch (const TypeMismatch& error) {
    EXPECT_NE(std::string(error.what()).find("safetensors"), std::string::npos) << error.what();
  }
  EXPECT_EQ(folder.files(), 0u);
}

TEST(Npy, memory_of_another_device_is_refused) {
  const TestFolder folder;
  const float value = 1;
  const ConstTensorView elsewhere(&value, DType::f32, {1}, Device{DeviceType::cuda, 0});
  EXPECT_THROW(save_npy(folder / "x.npy", elsewhere), Unsupported);
  EXPECT_EQ(folder.files(), 0u);
}

TEST(Npy, the_header_is_numpys_and_the_elements_are_aligned) {
  const TestFolder folder;
  const auto written = [&](const Tensor& tensor) {
    save_npy(folder / "x.npy", tensor, {.overwrite = true});
    return content_of(folder / "x.npy");
  };
  const Tensor counted = Tensor::of<float>({2, 3}, {0, 1, 2, 3, 4, 5});
  EXPECT_EQ(written(counted), std::string(reinterpret_cast<const char*>(foreign::npy_f4), sizeof foreign::npy_f4));
  EXPECT_NE(written(Tensor({7})).find("'shape': (7,), }"), std::string::npos);
  EXPECT_NE(written(Tensor(Dims{})).find("'shape': (), }"), std::string::npos);
  EXPECT_EQ(written(Tensor(Dims{})).size() % 64, 4u);
}

TEST(Npy, files_of_numpy_are_read) {
  const TestFolder folder;
  const auto loaded = [&](const auto& content) { return load_npy(put(folder / "x.npy", content)); };
  const Tensor counted = Tensor::of<float>({2, 3}, {0, 1, 2, 3, 4, 5});
  EXPECT_TRUE(same(loaded(foreign::npy_f4), counted));
  EXPECT_TRUE(same(loaded(foreign::npy_f8_version_2), convert(counted, DType::f64)));
  EXPECT_TRUE(same(loaded(foreign::npy_f2_version_3), convert(counted, DType::f16)));
  EXPECT_TRUE(same(loaded(foreign::npy_i8_scalar), Tensor::of<std::int64_t>({}, {-7})));
  EXPECT_TRUE(same(loaded(foreign::npy_b1), Tensor::of<bool>({3}, {true, false, true})));
  EXPECT_TRUE(same(loaded(foreign::npy_empty), Tensor({3, 0, 2})));
}

TEST(Npy, fortran_order_is_read_as_the_same_numbers) {
  const TestFolder folder;
  const Tensor tensor = load_npy(put(folder / "x.npy", foreign::npy_i4_fortran));
  ASSERT_EQ(tensor.sizes(), (Dims{2, 3, 4}));
  for (std::int32_t i = 0; i < 24; ++i) {
    EXPECT_EQ(tensor.as<std::int32_t>()[i], i);
  }
}

TEST(Npy, header_spelling_that_python_allows_is_read) {
  const TestFolder folder;
  const std::string header = "{\"shape\" :( 2 ,1,),'fortran_order':True , \"descr\":'<i4'}";
  const std::string data = little_endian(std::int32_t{5}) + little_endian(std::int32_t{6});
  EXPECT_TRUE(same(load_npy(put(folder / "x.npy", npy_with(header, data))), Tensor::of<std::int32_t>({2, 1}, {5, 6})));
}

TEST(Npy, types_that_no_tensor_has_are_named) {
  const TestFolder folder;
  const auto refused = [&](const auto& content, const std::string& found) {
    const auto path = put(folder / "x.npy", content);
    expect_file_error([&] { load_npy(path); }, {"<f4, <f8, <f2, |b1, <i4, <i8", found});
  };
  refused(foreign::npy_big_endian, "\">f4\" (big-endian)");
  refused(foreign::npy_complex, "\"<c16\"");
  refused(foreign::npy_structured, "[('a', '<f4'), ('b', '<i4')]");
  refused(foreign::npy_object, "never unpickled");
}

TEST(Npy, a_truncated_file_is_an_error_that_names_the_sizes) {
  const std::string whole(reinterpret_cast<const char*>(foreign::npy_f4), sizeof foreign::npy_f4);
  expect_bad_npy(whole.substr(0, whole.size() - 1), {"expected 24 bytes of elements (f32 of shape (2, 3)), found 23"});
  expect_bad_npy(whole.substr(0, 100), {"expected a header of 118 bytes, found 90"});
  expect_bad_npy(whole.substr(0, 9), {"expected 2 bytes for the header's length, found 1"});
  expect_bad_npy(whole.substr(0, 3), {"found 3 bytes"});
  expect_bad_npy("", {"found 0 bytes"});
}

TEST(Npy, bytes_after_the_elements_are_an_error) {
  expect_bad_npy(npy_of_shape("(1,)", std::string(5, '\0')), {"expected 4 bytes of elements", "found 5"});
}

TEST(Npy, what_is_no_npy_file_is_an_error) {
  expect_bad_npy("PK\3\4 and more", {"expected a .npy array", "PK\\x03\\x04"});
  expect_bad_npy("\x93NUMPY\4" + std::string(20, '\0'), {"version 1.0, 2.0 or 3.0, found 4.0"});
  expect_bad_npy("\x93NUMPY\1\1" + std::string(20, '\0'), {"found 1.1"});
}

TEST(Npy, a_claim_larger_than_the_file_is_refused_before_memory_is_asked_for) {
  expect_bad_npy(npy_of_shape("(1000000000000,)"), {"at most 1099511627776 bytes for one tensor, found 4000000000000"});
  expect_bad_npy(npy_of_shape("(100000000000,)"), {"expected 400000000000 bytes", "found 0"});
  std::string version_2 = "\x93NUMPY" + std::string("\2\0", 2) + little_endian(std::uint32_t{0x7fffffff});
  expect_bad_npy(version_2, {"at most 104857600 bytes, found 2147483647"});
  version_2 = "\x93NUMPY" + std::string("\2\0", 2) + little_endian(std::uint32_t{100'000'000});
  expect_bad_npy(version_2, {"expected a header of 100000000 bytes, found 0"});
}

TEST(Npy, shapes_that_overflow_are_refused) {
  expect_bad_npy(npy_of_shape("(4294967296, 4294967296)"), {"less than 2^63 bytes", "(4294967296, 4294967296)"});
  expect_bad_npy(npy_of_shape("(18446744073709551615,)"), {"sizes below 2^63, found 18446744073709551615"});
  expect_bad_npy(npy_of_shape("(99999999999999999999999,)"), {"a size from 0 to 2^63 - 1"});
  expect_bad_npy(npy_of_shape("(-1,)", std::string(4, '\0')), {"a size from 0 to 2^63 - 1", "-1"});
  expect_bad_npy(npy_of_shape("(1, 1, 1, 1, 1, 1, 1, 1, 1)", std::string(4, '\0')), {"at most 8 dimensions"});
}

TEST(Npy, an_empty_tensor_may_have_any_other_size) {
  const TestFolder folder;
  const std::string shape = "(0, 4611686018427387904, 4611686018427387904)";
  for (const std::string order : {"True", "False"}) {
    const auto path =
        put(folder / "x.npy", npy_with("{'descr': '<f4', 'fortran_order': " + order + ", 'shape': " + shape + "}"));
    EXPECT_EQ(load_npy(path).elements(), 0);
  }
}

TEST(Npy, headers_that_are_not_the_expected_dictionary_are_refused) {
  const std::string begin = "{'descr': '<f4', 'fortran_order': False, ";
  expect_bad_npy(npy_with(begin + "}"), {"without shape"});
  expect_bad_npy(npy_with("{'fortran_order': False, 'shape': ()}"), {"without descr"});
  expect_bad_npy(npy_with("{'descr': '<f4', 'shape': ()}"), {"without fortran_order"});
  expect_bad_npy(npy_with(begin + "'shape': (), 'shape': ()}"), {"once each", "\"shape\""});
  expect_bad_npy(npy_with(begin + "'shape': (), 'more': 1}"), {"once each", "\"more\""});
  expect_bad_npy(npy_with(begin + "'shape': ()} x"), {"the end of the header", "\"x\""});
  expect_bad_npy(npy_with(begin + "'shape': ()"), {"'}'"});
  expect_bad_npy(npy_with(begin + "'shape': (3)}"), {"','"});
  expect_bad_npy(npy_with(begin + "'shape': (3 4)}"), {"','"});
  expect_bad_npy(npy_with(begin + "'shape': [3]}"), {"'('"});
  expect_bad_npy(npy_with(begin + "'shape': ((3,),)}"), {"a size"});
  expect_bad_npy(npy_with(begin + "'shape"), {"a string"});
  expect_bad_npy(npy_with("{'descr': '<f4', 'fortran_order': 0, 'shape': ()}"), {"True or False"});
  expect_bad_npy(npy_with("{'descr': 4}"), {"a string"});
  expect_bad_npy(npy_with(std::string(60'000, '{')), {"a string"});
  expect_bad_npy(npy_with("{'descr': " + std::string(60'000, '[')), {"structured"});
  expect_bad_npy(npy_with("__import__('os').system('true')"), {"'{'"});
  expect_bad_npy(npy_with(""), {"'{'"});
}

TEST(Npy, limits_of_the_caller_are_kept) {
  const TestFolder folder;
  const auto path = put(folder / "x.npy", foreign::npy_f4);
  EXPECT_NO_THROW(load_npy(path, {.header_bytes = 118, .tensor_bytes = 24}));
  expect_file_error([&] { load_npy(path, {.header_bytes = 117}); }, {"at most 117 bytes, found 118"});
  expect_file_error([&] { load_npy(path, {.tensor_bytes = 23}); }, {"at most 23 bytes", "found 24"});
}

TEST(Npy, what_cannot_be_opened_is_an_error_in_the_systems_words) {
  const TestFolder folder;
  const auto missing = folder / "missing.npy";
  expect_file_error([&] { load_npy(missing); }, {"load_npy: " + missing.string(), "No such file or directory"});
  const auto directory = folder / "folder.npy";
  std::filesystem::create_directory(directory);
  expect_file_error([&] { load_npy(directory); }, {"Is a directory"});
  const auto fifo = folder / "fifo.npy";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  expect_file_error([&] { load_npy(fifo); }, {"expected a regular file, found a FIFO"});
  expect_file_error([&] { load_npy("/dev/null"); }, {"expected a regular file"});
}

TEST(Npy, a_file_without_permission_is_an_error_in_the_systems_words) {
  const TestFolder folder;
  const auto path = put(folder / "x.npy", foreign::npy_f4);
  ASSERT_EQ(::chmod(path.c_str(), 0), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    constexpr uid_t nobody = 65534;
    const bool lowered = ::geteuid() != 0 || ::seteuid(nobody) == 0;  // root may read everything
    try {
      load_npy(path);
    } catch (const FileError& error) {
      ::_exit(lowered && std::strstr(error.what(), "Permission denied") != nullptr ? 0 : 1);
    }
    ::_exit(2);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(Npy, error_texts_are_short_and_printable_whatever_the_file_holds) {
  const TestFolder folder;
  const auto path = put(folder / "x.npy", npy_with("{'descr': '" + std::string(5000, '\xff') + "'}"));
  try {
    load_npy(path);
    FAIL() << "no error";
  } catch (const FileError& error) {
    const std::string found = error.what();
    EXPECT_LT(found.size(), 700u + path.string().size());
    for (const char character : found) {
      EXPECT_TRUE(character >= 0x20 && character < 0x7f);
    }
  }
}

}  // namespace
}  // namespace headway
