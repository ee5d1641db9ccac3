// load_npz and save_npz: a .zip archive with a .npy array for each name.
#include <string_view>
#include <utility>

#include "core/out_of_memory.h"
#include "core/utf8.h"
#include "headway/io.h"
#include "io/npy_format.h"
#include "io/text_checks.h"
#include "io/zip_directory.h"
#include "io/zip_entry_reader.h"
#include "io/zip_writer.h"

namespace headway {
namespace {

constexpr std::string_view suffix = ".npy";

std::string tensor_name(const std::string& member) {
  return member.ends_with(suffix) ? member.substr(0, member.size() - suffix.size()) : member;
}

// Archives store the length of a name in 16 bits, and readers end a name at a zero byte.
void require_name(const std::string& name) {
  constexpr std::size_t longest = 0xffff - suffix.size();
  if (name.size() > longest || name.find('\0') != std::string::npos || !is_utf8(name)) {
    throw InvalidArgument(text("save_npz: expected names in UTF-8 of at most ", longest,
                               " bytes and no zero byte, found ", io::shown(name)));
  }
}

}  // namespace

NamedTensors load_npz(const std::filesystem::path& path, const ReadLimits& limits) try {
  const io::InputFile file("load_npz", path);
  NamedTensors tensors;
  for (const io::ZipEntry& entry : io::read_zip_directory(file, limits)) {
    const io::FileContext context = io::member_context(file, entry);
    std::string name = tensor_name(entry.name);
    if (tensors.contains(name)) {
      context.fail("expected each name once, found it again");
    }
    io::ZipEntryReader source(file, entry, context);
    Tensor tensor = io::read_npy(source, context, limits);
    source.finish();
    tensors.emplace(std::move(name), std::move(tensor));
  }
  return tensors;
} catch (...) {
  throw_own_error("load_npz");
}

void save_npz(const std::filesystem::path& path, const NamedViews& tensors, const WriteOptions& options) try {
  io::refuse_other_format("save_npz", path, ".npz");
  for (const auto& [name, view] : tensors) {
    require_name(name);
    io::require_npy("save_npz", name, view);
  }
  io::OutputFile file("save_npz", path, options.overwrite);
  io::ZipWriter archive(file);
  for (const auto& [name, tensor] : tensors) {
    const ConstTensorView& view = tensor;
    archive.add(name + std::string(suffix), io::npy_bytes(view), options.compress,
                [&view](const io::ByteSink& sink) { io::write_npy(sink, view); });
  }
  archive.finish();
  file.commit();
} catch (...) {
  throw_own_error("save_npz");
}

}  // namespace headway
