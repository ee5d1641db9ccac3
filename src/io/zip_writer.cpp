// Writes a .zip archive sequentially. A member's header is written twice: first as a placeholder, then again with the
// sizes and the checksum, so that no data has to be held in memory.
#include "io/zip_writer.h"

#include <zlib.h>

#include <algorithm>

#include "headway/error.h"
#include "io/zip_format.h"

namespace headway::io {
namespace {

struct Member {
  const std::string& name;
  std::uint16_t method = zip::stored;
  bool wide = false;  // its sizes may not fit 32 bits and are in a zip64 field
  std::uint32_t checksum = 0;
  std::uint64_t packed_bytes = 0;
  std::uint64_t bytes = 0;
  std::uint64_t header_offset = 0;
};

bool fits_32(std::uint64_t value) { return value < zip::in_zip64_32; }

std::uint32_t narrow_or_marked(std::uint64_t value) {
  return fits_32(value) ? static_cast<std::uint32_t>(value) : zip::in_zip64_32;
}

// The fields that a member has both in the directory and in its local header.
void append_common_fields(Bytes& to, const Member& member, std::uint16_t extra_bytes) {
  constexpr std::uint16_t version_deflate = 20;
  constexpr std::uint16_t version_zip64 = 45;
  constexpr std::uint32_t first_of_january_1980 = 0x00210000;  // a fixed date: the same tensors give the same bytes
  const auto is_ascii = [](char c) { return static_cast<unsigned char>(c) < 0x80; };
  const bool ascii = std::all_of(member.name.begin(), member.name.end(), is_ascii);
  append_integer(to, extra_bytes > 0 ? version_zip64 : version_deflate);
  append_integer(to, ascii ? std::uint16_t{0} : zip::flag_utf8);
  append_integer(to, member.method);
  append_integer(to, first_of_january_1980);
  append_integer(to, member.checksum);
  append_integer(to, member.wide ? zip::in_zip64_32 : static_cast<std::uint32_t>(member.packed_bytes));
  append_integer(to, member.wide ? zip::in_zip64_32 : static_cast<std::uint32_t>(member.bytes));
  append_integer(to, static_cast<std::uint16_t>(member.name.size()));
  append_integer(to, extra_bytes);
}

Bytes zip64_field(const Member& member, bool with_offset) {
  Bytes numbers;
  if (member.wide) {
    append_integer(numbers, member.bytes);
    append_integer(numbers, member.packed_bytes);
  }
  if (with_offset) {
    append_integer(numbers, member.header_offset);
  }
  Bytes field;
  if (!numbers.empty()) {
    append_integer(field, zip::zip64_extra);
    append_integer(field, static_cast<std::uint16_t>(numbers.size()));
    append_bytes(field, numbers);
  }
  return field;
}

Bytes local_header(const Member& member) {
  const Bytes extra = zip64_field(member, false);
  Bytes header;
  append_integer(header, zip::local_signature);
  append_common_fields(header, member, static_cast<std::uint16_t>(extra.size()));
  append_bytes(header, bytes_of(member.name));
  append_bytes(header, extra);
  return header;
}

void append_central_header(Bytes& to, const Member& member) {
  constexpr std::uint16_t made_on_unix = 3 << 8 | 45;
  constexpr std::uint32_t regular_file_0644 = 0100644u << 16;
  const Bytes extra = zip64_field(member, !fits_32(member.header_offset));
  append_integer(to, zip::central_signature);
  append_integer(to, made_on_unix);
  append_common_fields(to, member, static_cast<std::uint16_t>(extra.size()));
  append_integer(to, std::uint16_t{0});  // no comment
  append_integer(to, std::uint32_t{0});  // disk, internal attributes
  append_integer(to, regular_file_0644);
  append_integer(to, narrow_or_marked(member.header_offset));
  append_bytes(to, bytes_of(member.name));
  append_bytes(to, extra);
}

// Deflates what it is given into a file.
class Deflater {
 public:
  explicit Deflater(OutputFile& file) : file_(file), buffer_(std::size_t{1} << 16) {
    constexpr int memory_level = 8;
    if (deflateInit2(&stream_, Z_DEFAULT_COMPRESSION, Z_DEFLATED, zip::bare_window_bits, memory_level,
                     Z_DEFAULT_STRATEGY) != Z_OK) {
      throw OutOfMemory("save_npz: could not allocate what zlib needs");
    }
  }
  ~Deflater() { deflateEnd(&stream_); }
  Deflater(const Deflater&) = delete;
  Deflater& operator=(const Deflater&) = delete;

  void write(std::span<const std::byte> bytes) { run(bytes, Z_NO_FLUSH); }
  void finish() { run({}, Z_FINISH); }

 private:
  // `bytes` is a chunk of a tensor, so its size fits zlib's 32 bits.
  void run(std::span<const std::byte> bytes, int flush) {
    stream_.next_in = reinterpret_cast<z_const Bytef*>(const_cast<std::byte*>(bytes.data()));
    stream_.avail_in = static_cast<uInt>(bytes.size());
    do {
      stream_.next_out = reinterpret_cast<Bytef*>(buffer_.data());
      stream_.avail_out = static_cast<uInt>(buffer_.size());
      deflate(&stream_, flush);
      file_.write(std::span(buffer_).first(buffer_.size() - stream_.avail_out));
    } while (stream_.avail_out == 0);
  }

  OutputFile& file_;
  Bytes buffer_;
  z_stream stream_{};
};

// Runs `fill` with a sink that counts bytes and computes their checksum on the way to `next`.
void fill_counted(Member& member, const std::function<void(const ByteSink&)>& fill, const ByteSink& next) {
  uLong checksum = crc32_z(0, nullptr, 0);
  std::uint64_t bytes = 0;
  fill([&](std::span<const std::byte> chunk) {
    checksum = crc32_z(checksum, reinterpret_cast<const Bytef*>(chunk.data()), chunk.size());
    bytes += chunk.size();
    next(chunk);
  });
  member.checksum = static_cast<std::uint32_t>(checksum);
  member.bytes = bytes;
}

}  // namespace

void ZipWriter::add(const std::string& name, std::uint64_t bytes, bool compress,
                    const std::function<void(const ByteSink&)>& fill) {
  // Incompressible data grows a little, by far less than this.
  const bool wide = !fits_32(bytes + bytes / 64 + 1024);
  Member member{.name = name, .method = compress ? zip::deflated : zip::stored, .wide = wide};
  member.header_offset = file_.position();
  file_.write(local_header(member));
  const std::uint64_t data_offset = file_.position();
  if (compress) {
    Deflater deflater(file_);
    fill_counted(member, fill, [&](std::span<const std::byte> chunk) { deflater.write(chunk); });
    deflater.finish();
  } else {
    fill_counted(member, fill, file_.sink());
  }
  member.packed_bytes = file_.position() - data_offset;
  file_.rewrite(member.header_offset, local_header(member));
  append_central_header(directory_, member);
  ++entries_;
}

void ZipWriter::finish() {
  const std::uint64_t offset = file_.position();
  file_.write(directory_);
  write_end(offset);
}

void ZipWriter::write_end(std::uint64_t offset) {
  const std::uint64_t end = file_.position();
  Bytes record;
  if (entries_ >= zip::in_zip64_16 || !fits_32(offset) || !fits_32(directory_.size())) {
    append_integer(record, zip::end64_signature);
    append_integer(record, std::uint64_t{zip::end64_bytes - 12});  // bytes that follow this field
    append_integer(record, std::uint32_t{45 << 16 | 45});          // made by and needed: version 4.5
    append_integer(record, std::uint64_t{0});                      // disks
    append_integer(record, entries_);
    append_integer(record, entries_);
    append_integer(record, std::uint64_t{directory_.size()});
    append_integer(record, offset);
    append_integer(record, zip::locator64_signature);
    append_integer(record, std::uint32_t{0});
    append_integer(record, end);
    append_integer(record, std::uint32_t{1});
  }
  const auto entries = static_cast<std::uint16_t>(std::min<std::uint64_t>(entries_, zip::in_zip64_16));
  append_integer(record, zip::end_signature);
  append_integer(record, std::uint32_t{0});  // disks
  append_integer(record, entries);
  append_integer(record, entries);
  append_integer(record, narrow_or_marked(directory_.size()));
  append_integer(record, narrow_or_marked(offset));
  append_integer(record, std::uint16_t{0});  // no comment
  file_.write(record);
}

}  // namespace headway::io
