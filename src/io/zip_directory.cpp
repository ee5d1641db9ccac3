// The directory of a .zip archive, checked against the file before any member is read.
#include "io/zip_directory.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/utf8.h"
#include "io/bytes.h"
#include "io/text_checks.h"
#include "io/zip_format.h"

namespace headway::io {
namespace {

struct Directory {
  std::uint64_t entries = 0;
  std::uint64_t bytes = 0;
  std::uint64_t offset = 0;
};

Bytes read_bytes(const InputFile& file, std::uint64_t offset, std::uint64_t count) {
  Bytes bytes(count);
  file.read_at(offset, bytes);
  return bytes;
}

// The end record is the last thing in the file except for a comment, whose length it states.
std::uint64_t find_end_record(const InputFile& file) {
  const std::uint64_t searched = std::min<std::uint64_t>(file.size(), zip::end_bytes + 0xffff);
  const std::uint64_t start = file.size() - searched;
  const Bytes bytes = read_bytes(file, start, searched);
  const auto tail = std::span(bytes);
  for (std::size_t length = zip::end_bytes; length <= tail.size(); ++length) {
    const auto record = tail.last(length);
    const auto comment = load_integer<std::uint16_t>(record.subspan(zip::end_bytes - sizeof(std::uint16_t)));
    if (load_integer<std::uint32_t>(record) == zip::end_signature && comment == length - zip::end_bytes) {
      return file.size() - length;
    }
  }
  file.context().fail("expected a .zip archive, found no end-of-archive record at the end of its ", file.size(),
                      " bytes");
}

template <class Count, class Offset>
Directory take_directory(FieldReader& fields, std::uint64_t disks, const FileContext& context) {
  const auto here = fields.take<Count>();
  Directory directory{fields.take<Count>(), fields.take<Offset>(), fields.take<Offset>()};
  if (disks != 0 || here != directory.entries) {
    context.fail("expected an archive in one file, found a part of one that was split");
  }
  return directory;
}

// Where the zip64 record is, if a locator for one stands before the end record.
std::uint64_t find_end64_record(const InputFile& file, std::uint64_t end) {
  if (end < zip::locator64_bytes) {
    return end;
  }
  const std::uint64_t locator = end - zip::locator64_bytes;
  const Bytes bytes = read_bytes(file, locator, zip::locator64_bytes);
  FieldReader fields(bytes, file.context());
  if (fields.take<std::uint32_t>() != zip::locator64_signature) {
    return end;
  }
  fields.take<std::uint32_t>();
  const auto offset = fields.take<std::uint64_t>();
  if (offset > locator || locator - offset < zip::end64_bytes) {
    file.context().fail("expected a zip64 record before offset ", locator, ", found it said to be at ", offset);
  }
  return offset;
}

Directory read_end64_record(const InputFile& file, std::uint64_t offset, std::uint64_t end) {
  const Bytes bytes = read_bytes(file, offset, zip::end64_bytes);
  FieldReader fields(bytes, file.context());
  if (fields.take<std::uint32_t>() != zip::end64_signature) {
    file.context().fail("expected a zip64 record at offset ", offset, ", found something else");
  }
  constexpr std::uint64_t not_counted = sizeof(std::uint32_t) + sizeof(std::uint64_t);
  const std::uint64_t expected = end - zip::locator64_bytes - offset - not_counted;
  const auto length = fields.take<std::uint64_t>();
  if (length != expected) {
    file.context().fail("expected a zip64 record of ", expected, " bytes, found ", length);
  }
  fields.take<std::uint32_t>();  // versions
  const std::uint64_t disks = std::uint64_t{fields.take<std::uint32_t>()} + fields.take<std::uint32_t>();
  return take_directory<std::uint64_t, std::uint64_t>(fields, disks, file.context());
}

Directory read_end_record(const InputFile& file, std::uint64_t end) {
  const Bytes bytes = read_bytes(file, end, zip::end_bytes);
  FieldReader fields(bytes, file.context());
  fields.take<std::uint32_t>();  // the signature, by which it was found
  const std::uint64_t disks = std::uint64_t{fields.take<std::uint16_t>()} + fields.take<std::uint16_t>();
  return take_directory<std::uint16_t, std::uint32_t>(fields, disks, file.context());
}

Directory find_directory(const InputFile& file, const ReadLimits& limits) {
  const std::uint64_t end = find_end_record(file);
  const std::uint64_t end64 = find_end64_record(file, end);
  const Directory directory = end64 == end ? read_end_record(file, end) : read_end64_record(file, end64, end);
  if (directory.bytes > limits.header_bytes) {
    file.context().fail("expected a directory of at most ", limits.header_bytes, " bytes, found ", directory.bytes);
  }
  if (directory.offset > end64 || directory.bytes != end64 - directory.offset) {
    file.context().fail("expected the directory to end at offset ", end64, ", found ", directory.bytes,
                        " bytes said to be at ", directory.offset);
  }
  if (directory.entries > directory.bytes / zip::central_bytes) {
    file.context().fail("expected room for ", directory.entries, " entries in the directory, found ", directory.bytes,
                        " bytes");
  }
  return directory;
}

// Numbers that did not fit into their fields are in an extra field: only those, in this order.
void resolve_zip64(std::span<const std::byte> extra, std::initializer_list<std::uint64_t*> numbers,
                   const FileContext& context) {
  const auto is_elsewhere = [](const std::uint64_t* number) { return *number == zip::in_zip64_32; };
  if (std::none_of(numbers.begin(), numbers.end(), is_elsewhere)) {
    return;
  }
  FieldReader fields(extra, context);
  while (!fields.empty()) {
    const auto id = fields.take<std::uint16_t>();
    const auto value = fields.take(fields.take<std::uint16_t>());
    if (id != zip::zip64_extra) {
      continue;
    }
    FieldReader wide(value, context);
    for (std::uint64_t* number : numbers) {
      if (is_elsewhere(number)) {
        *number = wide.take<std::uint64_t>();
      }
    }
    return;
  }
  context.fail("expected a zip64 field for a size of 2^32 - 1 or more, found none");
}

// The fields that an entry has both in the directory and in its local header.
void take_common_fields(FieldReader& fields, ZipEntry& entry) {
  fields.take<std::uint16_t>();  // version needed
  entry.flags = fields.take<std::uint16_t>();
  entry.method = fields.take<std::uint16_t>();
  fields.take<std::uint32_t>();  // time and date
  entry.checksum = fields.take<std::uint32_t>();
  entry.packed_bytes = fields.take<std::uint32_t>();
  entry.bytes = fields.take<std::uint32_t>();
}

void require_readable(const ZipEntry& entry, const FileContext& context) {
  if ((entry.flags & zip::flag_encrypted) != 0) {
    context.fail("expected a member that is not encrypted, found an encrypted one");
  }
  if (entry.method != zip::stored && entry.method != zip::deflated) {
    context.fail("expected a member that is stored (0) or deflated (8), found compression method ", entry.method);
  }
  if (entry.method == zip::stored && entry.packed_bytes != entry.bytes) {
    context.fail("expected a stored member of ", entry.bytes, " bytes, found ", entry.packed_bytes);
  }
}

ZipEntry take_entry(FieldReader& fields, const InputFile& file) {
  if (fields.take<std::uint32_t>() != zip::central_signature) {
    file.context().fail("expected an entry in the directory, found something else");
  }
  ZipEntry entry;
  fields.take<std::uint16_t>();  // made by
  take_common_fields(fields, entry);
  const auto name_bytes = fields.take<std::uint16_t>();
  const auto extra_bytes = fields.take<std::uint16_t>();
  const auto comment_bytes = fields.take<std::uint16_t>();
  fields.take(8);  // disk and attributes
  entry.header_offset = fields.take<std::uint32_t>();
  entry.name = text_of(fields.take(name_bytes));
  const auto extra = fields.take(extra_bytes);
  fields.take(comment_bytes);
  const FileContext context = member_context(file, entry);
  // Some readers end a name at a zero byte, and would see other names than we do.
  if (!is_utf8(entry.name) || entry.name.find('\0') != std::string::npos) {
    context.fail("expected a name in UTF-8 and no zero byte, found other bytes");
  }
  resolve_zip64(extra, {&entry.bytes, &entry.packed_bytes, &entry.header_offset}, context);
  require_readable(entry, context);
  return entry;
}

// The local header must agree with the directory; otherwise two programs would read different data.
void require_same(const ZipEntry& entry, const ZipEntry& local, const FileContext& context) {
  bool same = entry.name == local.name && entry.method == local.method;
  if ((local.flags & zip::flag_sizes_follow) == 0) {
    same = same && entry.checksum == local.checksum && entry.bytes == local.bytes &&
           entry.packed_bytes == local.packed_bytes;
  }
  if (!same) {
    context.fail("expected the same name, method and sizes in the directory and before the data, found others");
  }
}

// Fills in data_offset; `end` is where members must end.
void locate_data(ZipEntry& entry, const InputFile& file, std::uint64_t end) {
  const FileContext context = member_context(file, entry);
  const auto require_room = [&](std::uint64_t offset, std::uint64_t bytes) {
    if (offset > end || bytes > end - offset) {
      context.fail("expected ", bytes, " bytes at offset ", offset, ", found that members end at ", end);
    }
  };
  require_room(entry.header_offset, zip::local_bytes);
  const Bytes header = read_bytes(file, entry.header_offset, zip::local_bytes);
  FieldReader fields(header, context);
  if (fields.take<std::uint32_t>() != zip::local_signature) {
    context.fail("expected a member at offset ", entry.header_offset, ", found something else");
  }
  ZipEntry local;
  take_common_fields(fields, local);
  const std::size_t name_bytes = fields.take<std::uint16_t>();
  const std::size_t extra_bytes = fields.take<std::uint16_t>();
  const std::uint64_t name_offset = entry.header_offset + zip::local_bytes;
  require_room(name_offset, name_bytes + extra_bytes);
  const Bytes rest = read_bytes(file, name_offset, name_bytes + extra_bytes);
  local.name = text_of(std::span(rest).first(name_bytes));
  resolve_zip64(std::span(rest).subspan(name_bytes), {&local.bytes, &local.packed_bytes}, context);
  require_same(entry, local, context);
  entry.data_offset = name_offset + rest.size();
  require_room(entry.data_offset, entry.packed_bytes);
}

void refuse_overlaps(const std::vector<ZipEntry>& entries, const FileContext& context) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
  ranges.reserve(entries.size());
  for (const ZipEntry& entry : entries) {
    ranges.emplace_back(entry.header_offset, entry.data_offset + entry.packed_bytes);
  }
  std::sort(ranges.begin(), ranges.end());
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].first < ranges[i - 1].second) {
      context.fail("expected members that do not overlap, found one at offset ", ranges[i].first,
                   " inside one that ends at ", ranges[i - 1].second);
    }
  }
}

}  // namespace

FileContext member_context(const InputFile& file, const ZipEntry& entry) {
  return file.context().within("member " + shown(entry.name));
}

std::vector<ZipEntry> read_zip_directory(const InputFile& file, const ReadLimits& limits) {
  const Directory directory = find_directory(file, limits);
  const Bytes bytes = read_bytes(file, directory.offset, directory.bytes);
  FieldReader fields(bytes, file.context());
  std::vector<ZipEntry> entries;
  while (!fields.empty()) {
    entries.push_back(take_entry(fields, file));
  }
  if (entries.size() != directory.entries) {
    file.context().fail("expected ", directory.entries, " entries in the directory, found ", entries.size());
  }
  for (ZipEntry& entry : entries) {
    locate_data(entry, file, directory.offset);
  }
  refuse_overlaps(entries, file.context());
  return entries;
}

}  // namespace headway::io
