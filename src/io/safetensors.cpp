// load_safetensors and save_safetensors: the length of a JSON header, the header, and the elements of all tensors.
#include <algorithm>
#include <array>
#include <string_view>
#include <utility>
#include <vector>

#include "core/out_of_memory.h"
#include "core/utf8.h"
#include "headway/io.h"
#include "io/bytes.h"
#include "io/input_file.h"
#include "io/output_file.h"
#include "io/safetensors_header.h"
#include "io/tensor_bytes.h"
#include "io/text_checks.h"

namespace headway {
namespace {

constexpr std::size_t length_bytes = sizeof(std::uint64_t);

std::string read_header(const io::InputFile& file, const ReadLimits& limits) {
  if (file.size() < length_bytes) {
    file.context().fail("expected at least ", length_bytes, " bytes, found ", file.size());
  }
  std::array<std::byte, length_bytes> start;
  file.read_at(0, start);
  const auto length = io::load_integer<std::uint64_t>(start);
  if (length > limits.header_bytes) {
    const std::string_view found(reinterpret_cast<const char*>(start.data()), start.size());
    if (found.starts_with("\x93NUMPY") || found.starts_with("PK\x03\x04")) {
      file.context().fail("expected a .safetensors file, found a ", found[0] == 'P' ? ".npz file" : ".npy array");
    }
    file.context().fail("expected a header of at most ", limits.header_bytes, " bytes, found ", length);
  }
  if (length > file.size() - length_bytes) {
    file.context().fail("expected a header of ", length, " bytes, found ", file.size() - length_bytes);
  }
  std::string header(length, '\0');
  file.read_at(length_bytes, std::as_writable_bytes(std::span(header)));
  return header;
}

// The format allows neither overlaps nor gaps: the tensors must follow each other from the first byte to the last.
void require_exact_cover(std::vector<io::SafetensorsEntry>& entries, std::uint64_t data_bytes, const ReadLimits& limits,
                         const io::FileContext& context) {
  std::sort(entries.begin(), entries.end(),
            [](const auto& a, const auto& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  std::uint64_t covered = 0;
  for (const io::SafetensorsEntry& entry : entries) {
    const io::FileContext tensor = context.within("tensor " + io::shown(entry.name));
    const std::uint64_t bytes = io::checked_bytes(entry.sizes, entry.dtype, limits, tensor);
    if (entry.end < entry.begin || entry.end - entry.begin != bytes) {
      tensor.fail("expected ", bytes, " bytes (", entry.dtype, " of shape ", entry.sizes, "), found data_offsets ",
                  entry.begin, " and ", entry.end);
    }
    if (entry.begin != covered) {
      tensor.fail("expected its data at offset ", covered, ", found ", entry.begin,
                  entry.begin < covered ? ": tensors overlap" : ": a hole before it");
    }
    covered = entry.end;
  }
  if (covered != data_bytes) {
    context.fail("expected ", covered, " bytes of data after the header, found ", data_bytes);
  }
}

void require_text(const char* what, const std::string& text_found) {
  if (!is_utf8(text_found)) {
    throw InvalidArgument(text("save_safetensors: expected ", what, " in UTF-8, found ", io::shown(text_found)));
  }
}

void require_writable(const NamedViews& tensors, const io::Metadata& metadata) {
  for (const auto& [name, view] : tensors) {
    io::require_host("save_safetensors", name, view);
    require_text("names", name);
    if (name == io::metadata_key) {
      throw InvalidArgument(text("save_safetensors: no tensor can have the name ", io::shown(name)));
    }
  }
  for (const auto& [key, value] : metadata) {
    require_text("metadata", key);
    require_text("metadata", value);
  }
}

// Wide elements first: after a header of a multiple of 8 bytes, every tensor is then aligned to its elements.
std::vector<NamedViews::const_iterator> in_file_order(const NamedViews& tensors) {
  std::vector<NamedViews::const_iterator> order;
  for (auto tensor = tensors.begin(); tensor != tensors.end(); ++tensor) {
    order.push_back(tensor);
  }
  std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return size_of(a->second.dtype()) > size_of(b->second.dtype());
  });
  return order;
}

std::string header_for(const std::vector<NamedViews::const_iterator>& order, const io::Metadata& metadata) {
  io::SafetensorsHeader header{.entries = {}, .metadata = metadata};
  std::uint64_t begin = 0;
  for (const auto& tensor : order) {
    const auto& [name, view] = *tensor;
    std::uint64_t end = 0;
    if (__builtin_add_overflow(begin, static_cast<std::uint64_t>(view.elements()) * size_of(view.dtype()), &end)) {
      throw InvalidArgument("save_safetensors: the tensors have more than 2^64 bytes");
    }
    header.entries.push_back({name, view.dtype(), view.sizes(), begin, end});
    begin = end;
  }
  std::string result = io::write_safetensors_header(header);
  constexpr std::size_t longest = 100'000'000;  // what other readers of the format accept
  if (result.size() > longest) {
    throw InvalidArgument(text("save_safetensors: expected names and metadata for a header of at most ", longest,
                               " bytes, found ", result.size()));
  }
  return result;
}

}  // namespace

SafetensorsFile load_safetensors(const std::filesystem::path& path, const ReadLimits& limits) try {
  const io::InputFile file("load_safetensors", path);
  const std::string json = read_header(file, limits);
  io::SafetensorsHeader header = io::parse_safetensors_header(json, file.context());
  const std::uint64_t data_offset = length_bytes + json.size();
  require_exact_cover(header.entries, file.size() - data_offset, limits, file.context());

  SafetensorsFile result{.tensors = {}, .metadata = std::move(header.metadata)};
  for (io::SafetensorsEntry& entry : header.entries) {
    io::FileRange source(file, data_offset + entry.begin, entry.end - entry.begin);
    result.tensors.emplace(std::move(entry.name), io::read_elements(source, entry.sizes, entry.dtype));
  }
  return result;
} catch (...) {
  throw_own_error("load_safetensors");
}

void save_safetensors(const std::filesystem::path& path, const NamedViews& tensors,
                      const std::map<std::string, std::string>& metadata, const WriteOptions& options) try {
  io::refuse_other_format("save_safetensors", path, ".safetensors");
  require_writable(tensors, metadata);
  const auto order = in_file_order(tensors);
  const std::string header = header_for(order, metadata);
  io::Bytes length;
  io::append_integer(length, std::uint64_t{header.size()});

  io::OutputFile file("save_safetensors", path, options.overwrite);
  file.write(length);
  file.write(io::bytes_of(header));
  for (const auto& tensor : order) {
    io::write_elements(file.sink(), tensor->second);
  }
  file.commit();
} catch (...) {
  throw_own_error("save_safetensors");
}

}  // namespace headway
