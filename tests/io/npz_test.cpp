// .npz files: what NumPy writes, what we write, and what neither should.
#include <gtest/gtest.h>
#include <zlib.h>

#include "files.h"
#include "foreign_files.h"

namespace headway {
namespace {

// One member as an archive describes it; a test makes some of it a lie.
struct Member {
  std::string name = "a.npy";
  std::string packed;
  std::uint16_t method = 0;
  std::uint32_t checksum = 0;
  std::uint64_t bytes = 0;
  std::uint16_t flags = 0;
  bool wide = false;                   // sizes and offset in zip64 fields
  std::int64_t directory_offset = -1;  // where the directory says it is, when that is another place
};

std::string npy_of(const Tensor& tensor) {
  const TestFolder folder;
  save_npy(folder / "x.npy", tensor);
  return content_of(folder / "x.npy");
}

std::uint32_t checksum_of(const std::string& content) {
  return static_cast<std::uint32_t>(
      crc32(0, reinterpret_cast<const Bytef*>(content.data()), static_cast<uInt>(content.size())));
}

Member stored(const std::string& content) {
  return {.packed = content, .checksum = checksum_of(content), .bytes = content.size()};
}

Member deflated(const std::string& content) {
  std::string packed(compressBound(content.size()), '\0');
  uLongf size = packed.size();
  compress(reinterpret_cast<Bytef*>(packed.data()), &size, reinterpret_cast<const Bytef*>(content.data()),
           content.size());
  // zlib's own frame around the same bits: two bytes before, four after.
  packed = packed.substr(2, size - 6);
  return {.packed = packed, .method = 8, .checksum = checksum_of(content), .bytes = content.size()};
}

std::string number_32(std::uint64_t value, bool elsewhere) {
  return little_endian(elsewhere ? std::uint32_t{0xffffffff} : static_cast<std::uint32_t>(value));
}

std::string number_16(std::uint64_t value) { return little_endian(static_cast<std::uint16_t>(value)); }

std::string common_fields(const Member& member, std::size_t extra_bytes) {
  return number_16(45) + number_16(member.flags) + number_16(member.method) + number_32(0, false) +
         little_endian(member.checksum) + number_32(member.packed.size(), member.wide) +
         number_32(member.bytes, member.wide) + number_16(member.name.size()) + number_16(extra_bytes);
}

std::string zip64_field(std::initializer_list<std::uint64_t> numbers) {
  std::string result = number_16(1) + number_16(8 * numbers.size());
  for (const std::uint64_t number : numbers) {
    result += little_endian(number);
  }
  return result;
}

std::string end_of_zip(std::uint64_t entries, std::uint64_t bytes, std::uint64_t offset) {
  return "PK\5\6" + number_32(0, false) + number_16(entries) + number_16(entries) + number_32(bytes, false) +
         number_32(offset, false) + number_16(0);
}

std::string zip_of(const std::vector<Member>& members) {
  std::string archive;
  std::string directory;
  for (const Member& member : members) {
    const std::uint64_t offset =
        member.directory_offset < 0 ? archive.size() : static_cast<std::uint64_t>(member.directory_offset);
    const std::string local = member.wide ? zip64_field({member.bytes, member.packed.size()}) : "";
    const std::string central = member.wide ? zip64_field({member.bytes, member.packed.size(), offset}) : "";
    directory += "PK\1\2" + number_16(45) + common_fields(member, central.size()) + std::string(10, '\0') +
                 number_32(offset, member.wide) + member.name + central;
    archive += "PK\3\4" + common_fields(member, local.size()) + member.name + local + member.packed;
  }
  return archive + directory + end_of_zip(members.size(), directory.size(), archive.size());
}

NamedTensors loaded(const std::string& content, const ReadLimits& limits = {}) {
  const TestFolder folder;
  return load_npz(put(folder / "x.npz", content), limits);
}

void expect_bad_npz(const std::string& content, std::initializer_list<std::string> parts) {
  const TestFolder folder;
  const auto path = put(folder / "x.npz", content);
  const SmallMemory small;
  expect_file_error([&] { load_npz(path); }, {"load_npz: " + path.string() + ": "});
  expect_file_error([&] { load_npz(path); }, parts);
}

const std::string& one_tensor() {
  static const std::string content = npy_of(Tensor::of<float>({3}, {1, 2, 3}));
  return content;
}

// Offsets in an archive of one stored member, for tests that change one number.
constexpr std::size_t local_method = 8;
constexpr std::size_t end_entries = 10;
constexpr std::size_t end_directory_bytes = 12;
constexpr std::size_t end_directory_offset = 16;

TEST(Npz, every_type_shape_and_stride_comes_back_as_it_was_written) {
  const TestFolder folder;
  NamedTensors tensors;
  for (const DType dtype : all_types()) {
    for (const Dims& sizes : {Dims{}, Dims{5}, Dims{200, 300}, Dims{3, 0, 2}}) {
      if (dtype != DType::bf16) {
        tensors.emplace(std::string(name(dtype)) + "/" + std::to_string(tensors.size()), random_bits(sizes, dtype));
      }
    }
  }
  NamedViews views(tensors.begin(), tensors.end());
  views["transposed"] = tensors.at("f32/2").view().transpose(0, 1).flip(1);
  views["\xc3\xa9.npy"] = tensors.at("f32/0").view().expand({1000});
  views[""] = tensors.at("f32/1");
  for (const bool compress : {false, true}) {
    save_npz(folder / "x.npz", views, {.overwrite = true, .compress = compress});
    const NamedTensors back = load_npz(folder / "x.npz");
    ASSERT_EQ(back.size(), views.size());
    for (const auto& [key, view] : views) {
      EXPECT_TRUE(same(back.at(key), view)) << key;
    }
  }
}

TEST(Npz, compressing_makes_a_repetitive_file_smaller) {
  const TestFolder folder;
  const Tensor zeros({100'000});
  save_npz(folder / "stored.npz", {{"a", zeros}});
  save_npz(folder / "deflated.npz", {{"a", zeros}}, {.compress = true});
  EXPECT_GT(std::filesystem::file_size(folder / "stored.npz"), 400'000u);
  EXPECT_LT(std::filesystem::file_size(folder / "deflated.npz"), 4'000u);
}

TEST(Npz, the_same_tensors_give_the_same_bytes) {
  const TestFolder folder;
  const Tensor tensor({10});
  save_npz(folder / "a.npz", {{"a", tensor}}, {.compress = true});
  save_npz(folder / "b.npz", {{"a", tensor}}, {.compress = true});
  EXPECT_EQ(content_of(folder / "a.npz"), content_of(folder / "b.npz"));
}

TEST(Npz, more_members_than_16_bits_count_come_back) {
  const TestFolder folder;
  const Tensor tensor = Tensor::of<bool>({}, {true});
  NamedViews views;
  for (int i = 0; i < 65'600; ++i) {
    views.emplace(std::to_string(i), tensor);
  }
  save_npz(folder / "x.npz", views);
  EXPECT_EQ(load_npz(folder / "x.npz").size(), views.size());
}

TEST(Npz, files_of_numpy_are_read) {
  const TestFolder folder;
  const Tensor counted = Tensor::of<float>({2, 3}, {0, 1, 2, 3, 4, 5});
  const NamedTensors plain = load_npz(put(folder / "x.npz", foreign::npz_stored));
  EXPECT_EQ(plain.size(), 2u);
  EXPECT_TRUE(same(plain.at("a"), counted));
  EXPECT_TRUE(same(plain.at("b"), Tensor::of<std::int64_t>({3}, {0, 1, 2})));
  for (const auto& path :
       {put(folder / "1.npz", foreign::npz_deflated), put(folder / "2.npz", foreign::npz_streamed)}) {
    const NamedTensors packed = load_npz(path);
    EXPECT_EQ(packed.size(), 2u);
    EXPECT_TRUE(same(packed.at("a"), counted));
    EXPECT_TRUE(same(packed.at("b"), Tensor({1000}, DType::f64)));
  }
  EXPECT_TRUE(load_npz(put(folder / "x.npz", foreign::npz_empty)).empty());
}

TEST(Npz, sizes_in_zip64_fields_are_read) {
  Member wide = deflated(one_tensor());
  wide.wide = true;
  EXPECT_EQ(loaded(zip_of({wide})).at("a").sizes(), (Dims{3}));
}

TEST(Npz, what_cannot_be_written_is_refused_before_a_file_is_made) {
  const TestFolder folder;
  const Tensor half({2}, DType::bf16);
  const Tensor tensor({1});
  EXPECT_THROW(save_npz(folder / "x", {{"a", tensor}, {"b", half}}), TypeMismatch);
  EXPECT_THROW(save_npz(folder / "x", {{std::string("a\0b", 3), tensor}}), InvalidArgument);
  EXPECT_THROW(save_npz(folder / "x", {{"\xc0\x80", tensor}}), InvalidArgument);
  EXPECT_THROW(save_npz(folder / "x", {{std::string(65'532, 'n'), tensor}}), InvalidArgument);
  EXPECT_NO_THROW(save_npz(folder / "y", {{std::string(65'531, 'n'), tensor}}));
  EXPECT_EQ(folder.files(), 1u);
}

TEST(Npz, a_truncated_file_or_one_with_bytes_after_its_end_is_an_error) {
  const std::string whole = zip_of({stored(one_tensor())});
  ASSERT_EQ(loaded(whole).size(), 1u);
  expect_bad_npz("", {"expected a .zip archive", "0 bytes"});
  expect_bad_npz(whole.substr(0, whole.size() - 1), {"no end-of-archive record"});
  expect_bad_npz(whole.substr(0, 100), {"no end-of-archive record"});
  expect_bad_npz(whole + "x", {"no end-of-archive record"});
  expect_bad_npz("x" + whole, {"expected the directory to end at"});
}

TEST(Npz, a_comment_after_the_directory_is_allowed) {
  std::string content = zip_of({stored(one_tensor())});
  poke(content, content.size() - 2, std::uint16_t{5});
  EXPECT_EQ(loaded(content + "hello").size(), 1u);
  expect_bad_npz(content + "hell", {"no end-of-archive record"});
}

TEST(Npz, damaged_data_is_found_by_its_checksum) {
  for (Member member : {stored(one_tensor()), deflated(one_tensor())}) {
    member.checksum ^= 1;
    expect_bad_npz(zip_of({member}), {"member \"a.npy\"", "expected the checksum", "damaged"});
  }
}

TEST(Npz, a_member_that_unpacks_to_less_or_more_than_it_claims_is_an_error) {
  const std::string zeros = npy_of(Tensor({5000}));
  Member less = deflated(zeros.substr(0, zeros.size() - 4));
  less.bytes = zeros.size();
  expect_bad_npz(zip_of({less}), {"expected 20128 bytes when unpacked, found 20124"});
  Member more = deflated(zeros + "x");
  more.bytes = zeros.size();
  expect_bad_npz(zip_of({more}), {"expected 20128 bytes when unpacked, found more"});
  Member longer = deflated(zeros);
  longer.packed += "x";
  expect_bad_npz(zip_of({longer}), {"found 1 bytes after its end"});
  Member cut = deflated(zeros);
  cut.packed.pop_back();
  expect_bad_npz(zip_of({cut}), {"expected deflated data, found its end missing"});
  Member other = deflated(zeros);
  other.packed = std::string(200, '\xff');
  expect_bad_npz(zip_of({other}), {"expected deflated data, found other bytes"});
}

TEST(Npz, a_claim_that_no_deflated_data_could_keep_is_refused_before_memory_is_asked_for) {
  Member bomb = deflated(one_tensor());
  bomb.bytes = 1'000'000'000;
  expect_bad_npz(zip_of({bomb}), {"at most 1032 bytes", "found a claim of 1000000000"});
  bomb.wide = true;
  bomb.bytes = 0x7fffffffffffffff;
  expect_bad_npz(zip_of({bomb}), {"found a claim of 9223372036854775807"});
  // The member is honest about its size, the array in it is not.
  std::string lying = one_tensor();
  lying.replace(lying.find("(3,)"), 18, "(100000000000,), }");
  expect_bad_npz(zip_of({deflated(lying)}), {"expected 400000000000 bytes of elements", "found 12"});
}

TEST(Npz, a_bomb_stops_at_the_callers_limit) {
  const std::string zeros = npy_of(Tensor({1'000'000}));
  const std::string content = zip_of({deflated(zeros)});
  ASSERT_LT(content.size(), 10'000u);
  EXPECT_NO_THROW(loaded(content, {.tensor_bytes = 4'000'000}));
  expect_file_error([&] { loaded(content, {.tensor_bytes = 3'999'999}); }, {"at most 3999999 bytes for one tensor"});
  expect_file_error([&] { loaded(content, {.header_bytes = 117}); }, {"header of at most 117 bytes, found 118"});
  expect_file_error([&] { loaded(content, {.header_bytes = 50}); }, {"directory of at most 50 bytes, found 51"});
}

TEST(Npz, members_that_share_bytes_are_refused) {
  const Member first = stored(one_tensor());
  Member same_place = first;
  same_place.directory_offset = 0;
  expect_bad_npz(zip_of({first, same_place}), {"members that do not overlap"});
  // A whole archive member inside another's data.
  Member inner = first;
  const std::string inside = zip_of({first});
  Member outer = stored(inside);
  outer.name = "b.npy";
  inner.directory_offset = 30 + 5;
  expect_bad_npz(zip_of({outer, inner}), {"members that do not overlap"});
}

TEST(Npz, repeated_names_are_refused) {
  const Member member = stored(one_tensor());
  expect_bad_npz(zip_of({member, member}), {"member \"a.npy\"", "each name once"});
  Member bare = member;
  bare.name = "a";
  expect_bad_npz(zip_of({member, bare}), {"member \"a\"", "each name once"});
}

TEST(Npz, members_outside_the_file_are_refused) {
  Member member = stored(one_tensor());
  member.directory_offset = 0x70000000;
  expect_bad_npz(zip_of({member}), {"bytes at offset 1879048192, found that members end at"});
  member.wide = true;
  member.directory_offset = 0x7fffffffffffffff;
  expect_bad_npz(zip_of({member}), {"bytes at offset 9223372036854775807, found that members end at"});
  member = stored(one_tensor());
  member.directory_offset = 1;
  expect_bad_npz(zip_of({member}), {"expected a member at offset 1, found something else"});
  std::string content = zip_of({stored(one_tensor())});
  poke(content, 28, std::uint16_t{0xffff});  // a local extra field that runs over the directory
  expect_bad_npz(content, {"found that members end at"});
}

TEST(Npz, members_that_cannot_be_unpacked_are_named) {
  Member member = stored(one_tensor());
  member.flags = 1;
  expect_bad_npz(zip_of({member}), {"encrypted"});
  member.flags = 0;
  member.method = 12;
  expect_bad_npz(zip_of({member}), {"stored (0) or deflated (8), found compression method 12"});
  member.method = 0;
  member.bytes += 1;
  expect_bad_npz(zip_of({member}), {"expected a stored member of 141 bytes, found 140"});
}

TEST(Npz, members_that_are_no_arrays_are_refused) {
  expect_bad_npz(zip_of({stored("a text")}), {"member \"a.npy\"", "expected a .npy array", "6 bytes"});
  expect_bad_npz(zip_of({stored("a longer text")}), {"expected a .npy array"});
  Member member = stored(one_tensor());
  member.name = "\xff.npy";
  expect_bad_npz(zip_of({member}), {"member \"\\xff.npy\"", "expected a name in UTF-8 and no zero byte"});
  member.name = std::string("a\0b.npy", 7);
  expect_bad_npz(zip_of({member}), {"member \"a\\x00b.npy\"", "expected a name in UTF-8 and no zero byte"});
}

TEST(Npz, a_directory_that_contradicts_the_data_or_itself_is_refused) {
  const std::string whole = zip_of({stored(one_tensor())});
  const std::size_t end = whole.size() - 22;
  const auto changed = [&](std::size_t offset, auto value) {
    std::string content = whole;
    poke(content, offset, value);
    return content;
  };
  expect_bad_npz(changed(local_method, std::uint16_t{8}), {"the same name, method and sizes"});
  expect_bad_npz(changed(30, 'z'), {"the same name, method and sizes"});
  expect_bad_npz(changed(22, std::uint32_t{1}), {"the same name, method and sizes"});
  expect_bad_npz(changed(22, std::uint32_t{0xffffffff}), {"expected a zip64 field"});
  expect_bad_npz(changed(end + end_entries - 2, std::uint16_t{2}), {"split"});
  expect_bad_npz(changed(end + end_directory_bytes, std::uint32_t{0xffffffff}), {"at most 104857600"});
  expect_bad_npz(changed(end + end_directory_offset, std::uint32_t{0xffffffff}), {"the directory to end at"});
  expect_bad_npz(changed(end - 51, std::uint32_t{0}), {"expected an entry in the directory"});
  expect_bad_npz(changed(end - 51 + 28, std::uint16_t{500}), {"expected 500 more bytes, found 5"});
  std::string two = changed(end + end_entries - 2, std::uint16_t{2});
  poke(two, end + end_entries, std::uint16_t{2});
  expect_bad_npz(two, {"room for 2 entries"});
  std::string none = changed(end + end_entries - 2, std::uint16_t{0});
  poke(none, end + end_entries, std::uint16_t{0});
  expect_bad_npz(none, {"expected 0 entries in the directory, found 1"});
}

TEST(Npz, a_zip64_record_that_lies_is_refused) {
  const std::string whole = zip_of({stored(one_tensor())});
  const std::uint64_t end = whole.size() - 22;
  const auto with_zip64 = [&](std::uint64_t record_at, std::uint64_t length, std::uint64_t entries) {
    const std::string zeros(8, '\0');
    return whole.substr(0, end) + "PK\6\6" + little_endian(length) + std::string(4, '\0') + zeros +
           little_endian(entries) + little_endian(entries) + little_endian(std::uint64_t{51}) +
           little_endian(std::uint64_t{end - 51}) + "PK\6\7" + std::string(4, '\0') + little_endian(record_at) +
           std::string("\1\0\0\0", 4) + end_of_zip(0xffff, 0xffffffff, 0xffffffff);
  };
  EXPECT_EQ(loaded(with_zip64(end, 44, 1)).size(), 1u);
  expect_bad_npz(with_zip64(0xffffffffffffffff, 44, 1), {"said to be at 18446744073709551615"});
  expect_bad_npz(with_zip64(end + 1, 44, 1), {"expected a zip64 record before"});
  expect_bad_npz(with_zip64(0, 44, 1), {"expected a zip64 record at offset 0"});
  expect_bad_npz(with_zip64(end, 0xffffffffffffffff, 1), {"expected a zip64 record of 44 bytes"});
  expect_bad_npz(with_zip64(end, 44, 0xffffffffffffffff), {"room for 18446744073709551615 entries"});
}

}  // namespace
}  // namespace headway
