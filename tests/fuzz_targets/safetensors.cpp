// .safetensors files: each loads, and then saves and loads again to the same bits and texts, or is a FileError.
#include "support.h"

using namespace headway;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const fuzz::InputAsFile file;
  static const fuzz::Folder folder;
  try {
    const SafetensorsFile found = load_safetensors(file.holding(data, size));
    fuzz::require(fuzz::bytes_of(found.tensors) <= size, "more than the file");
    const auto path = folder / "again.safetensors";
    save_safetensors(path, NamedViews(found.tensors.begin(), found.tensors.end()), found.metadata, {.overwrite = true});
    const SafetensorsFile again = load_safetensors(path);
    fuzz::require(fuzz::same(again.tensors, found.tensors), "other bits after saving and loading");
    fuzz::require(again.metadata == found.metadata, "other metadata after saving and loading");
  } catch (const FileError& error) {
    fuzz::require_printable(error.what());
  }
  return 0;
}
