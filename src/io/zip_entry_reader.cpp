// The unpacked bytes of one member of a .zip archive.
#include "io/zip_entry_reader.h"

#include <algorithm>

#include "io/zip_format.h"

namespace headway::io {
namespace {

constexpr std::size_t piece_bytes = std::size_t{1} << 18;  // stays in cache between unpacking and the checksum
constexpr std::size_t buffer_bytes = std::size_t{1} << 16;
constexpr std::uint64_t largest_ratio = 1032;  // deflate: 258 bytes from two bits

}  // namespace

ZipEntryReader::ZipEntryReader(const InputFile& file, const ZipEntry& entry, const FileContext& context)
    : entry_(entry),
      context_(context),
      packed_(file, entry.data_offset, entry.packed_bytes),
      remaining_(entry.bytes),
      checksum_(crc32_z(0, nullptr, 0)) {
  if (entry.method == zip::stored) {
    return;
  }
  if (entry.bytes / largest_ratio > entry.packed_bytes) {
    context.fail("expected at most ", largest_ratio, " bytes from each of ", entry.packed_bytes,
                 " packed ones, found a claim of ", entry.bytes);
  }
  buffer_.resize(std::min<std::uint64_t>(buffer_bytes, std::max<std::uint64_t>(entry.packed_bytes, 1)));
  if (inflateInit2(&stream_, zip::bare_window_bits) != Z_OK) {
    throw OutOfMemory("load_npz: could not allocate what zlib needs");
  }
}

ZipEntryReader::~ZipEntryReader() {
  if (entry_.method == zip::deflated) {
    inflateEnd(&stream_);
  }
}

void ZipEntryReader::read(std::span<std::byte> to) {
  if (to.size() > remaining_) {
    context_.fail("expected ", to.size(), " more bytes, found ", remaining_);
  }
  while (!to.empty()) {
    const auto piece = to.first(std::min(to.size(), piece_bytes));
    if (entry_.method == zip::stored) {
      packed_.read(piece);
    } else {
      inflate_into(piece);
    }
    checksum_ = crc32_z(checksum_, reinterpret_cast<const Bytef*>(piece.data()), piece.size());
    remaining_ -= piece.size();
    to = to.subspan(piece.size());
  }
}

void ZipEntryReader::inflate_into(std::span<std::byte> to) {
  while (!to.empty()) {
    if (ended_) {
      context_.fail("expected ", entry_.bytes, " bytes when unpacked, found ", stream_.total_out);
    }
    to = to.last(inflate_step(to));
  }
}

void ZipEntryReader::refill() {
  const auto count = static_cast<std::size_t>(std::min<std::uint64_t>(packed_.remaining(), buffer_.size()));
  packed_.read(std::span(buffer_).first(count));
  stream_.next_in = reinterpret_cast<Bytef*>(buffer_.data());
  stream_.avail_in = static_cast<uInt>(count);
}

// Unpacks to the front of `to`; returns how many of its bytes remain to be filled.
std::size_t ZipEntryReader::inflate_step(std::span<std::byte> to) {
  if (stream_.avail_in == 0) {
    refill();
  }
  const bool had_input = stream_.avail_in > 0;
  stream_.next_out = reinterpret_cast<Bytef*>(to.data());
  stream_.avail_out = static_cast<uInt>(to.size());
  const int status = inflate(&stream_, Z_NO_FLUSH);
  ended_ = status == Z_STREAM_END;
  if (status == Z_MEM_ERROR) {
    throw OutOfMemory("load_npz: could not allocate what zlib needs");
  }
  if (status != Z_OK && !ended_) {
    context_.fail("expected deflated data, found ", had_input ? "other bytes" : "its end missing");
  }
  return stream_.avail_out;
}

// One byte more than claimed, so that excess data is noticed.
void ZipEntryReader::refuse_rest() {
  std::byte spare{};
  while (!ended_) {
    if (inflate_step({&spare, 1}) == 0) {
      context_.fail("expected ", entry_.bytes, " bytes when unpacked, found more");
    }
  }
  const std::uint64_t unused = packed_.remaining() + stream_.avail_in;
  if (unused != 0) {
    context_.fail("expected deflated data of ", entry_.packed_bytes, " bytes, found ", unused, " bytes after its end");
  }
}

void ZipEntryReader::finish() {
  if (entry_.method == zip::deflated) {
    refuse_rest();
  }
  if (checksum_ != entry_.checksum) {
    context_.fail("expected the checksum ", entry_.checksum, ", found ", checksum_, ": the data is damaged");
  }
}

}  // namespace headway::io
