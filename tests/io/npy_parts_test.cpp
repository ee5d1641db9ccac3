// Slices of .npy files: what one process wrote whole, and what several wrote together.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>

#include "files.h"
#include "foreign_files.h"

namespace headway {
namespace {

TEST(NpyParts, a_slice_along_any_axis_is_that_of_the_whole) {
  const TestFolder folder;
  for (const DType dtype : {DType::f32, DType::f16, DType::b8}) {
    const Tensor whole = random_bits({3, 4, 5}, dtype);
    save_npy(folder / "x.npy", whole, {.overwrite = true});
    EXPECT_EQ(npy_shape(folder / "x.npy").sizes, whole.sizes());
    EXPECT_EQ(npy_shape(folder / "x.npy").dtype, dtype);
    for (int axis = 0; axis < 3; ++axis)
      for (std::int64_t begin = 0; begin <= whole.size(axis); ++begin)
        for (std::int64_t end = begin; end <= whole.size(axis); ++end)
          EXPECT_TRUE(same(load_npy_slice(folder / "x.npy", axis, begin, end), whole.view().slice(axis, begin, end)))
              << dtype << " axis " << axis << ": " << begin << " to " << end;
  }
}

TEST(NpyParts, fortran_order_is_read_by_slices_too) {
  const TestFolder folder;
  const auto path = put(folder / "x.npy", std::string(reinterpret_cast<const char*>(foreign::npy_i4_fortran),
                                                      sizeof foreign::npy_i4_fortran));
  const Tensor whole = load_npy(path);
  for (int axis = 0; axis < whole.rank(); ++axis)
    EXPECT_TRUE(same(load_npy_slice(path, axis, 1, 2), whole.view().slice(axis, 1, 2))) << axis;
}

// The elements of a file that claims more than any memory holds are not read.
TEST(NpyParts, slices_of_a_file_larger_than_memory_are_read_alone) {
  const TestFolder folder;
  const auto temporary = begin_npy(folder / "x.npy", {DType::f32, {1 << 20, 1 << 16}});  // 256 GiB, a hole
  const Tensor row = random_bits({2, 1 << 16}, DType::f32);
  write_npy_slice(temporary, 0, 1000, row);
  commit_npy(temporary, folder / "x.npy");
  EXPECT_TRUE(same(load_npy_slice(folder / "x.npy", 0, 1000, 1002), row));
}

TEST(NpyParts, slices_written_in_any_order_make_the_file_that_one_write_makes) {
  const TestFolder folder;
  const Tensor whole = random_bits({2, 7, 3}, DType::f64);
  save_npy(folder / "whole.npy", whole);
  const auto temporary = begin_npy(folder / "parts.npy", {DType::f64, whole.sizes()});
  EXPECT_FALSE(std::filesystem::exists(folder / "parts.npy"));
  write_npy_slice(temporary, 1, 5, whole.view().slice(1, 5, 7));
  write_npy_slice(temporary, 1, 0, whole.view().slice(1, 0, 5));
  commit_npy(temporary, folder / "parts.npy");
  EXPECT_EQ(content_of(folder / "parts.npy"), content_of(folder / "whole.npy"));
  EXPECT_FALSE(std::filesystem::exists(temporary));
}

// Other processes may still write into it.
TEST(NpyParts, a_slice_that_cannot_be_written_leaves_the_file_to_the_program) {
  const TestFolder folder;
  const auto temporary = begin_npy(folder / "x.npy", {DType::f32, {1024, 64}});
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{4096, before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  expect_file_error(
      [&] {
        write_npy_slice(temporary, 0, 512, random_bits({512, 64}, DType::f32));
      },
      {"write_npy_slice: ", "cannot write"});
  ::setrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, handler);
  EXPECT_TRUE(std::filesystem::exists(temporary));
}

TEST(NpyParts, what_does_not_fit_is_refused) {
  const TestFolder folder;
  const auto path = folder / "x.npy";
  save_npy(path, random_bits({2, 3}, DType::f32));
  expect_file_error([&] { load_npy_slice(path, 2, 0, 1); },
                    {"load_npy_slice: ", "expected an axis of shape (2, 3), found 2"});
  expect_file_error([&] { load_npy_slice(path, 1, 2, 4); }, {"expected a slice inside the 3 of axis 1, found 2 to 4"});
  expect_file_error([&] { begin_npy(path, {DType::f32, {1}}); }, {"begin_npy: ", "the file exists"});
  const auto temporary = begin_npy(folder / "y.npy", {DType::f32, {2, 3}});
  expect_file_error(
      [&] {
        write_npy_slice(temporary, 0, 1, random_bits({2, 3}, DType::f32));
      },
      {"write_npy_slice: ", "expected a slice inside the 2 of axis 0, found 1 to 3"});
  expect_file_error(
      [&] {
        write_npy_slice(temporary, 0, 0, random_bits({2, 4}, DType::f32));
      },
      {"expected f32 of shape (2, 3) in host memory, found f32 of shape (2, 4)"});
  EXPECT_THROW(begin_npy(folder / "z.npy", {DType::bf16, {1}}), TypeMismatch);
  EXPECT_FALSE(std::filesystem::exists(folder / "y.npy"));
}

}  // namespace
}  // namespace headway
