// .npy files: each loads, and then saves and loads again to the same bits, or is a FileError.
#include "support.h"

using namespace headway;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const fuzz::InputAsFile file;
  static const fuzz::Folder folder;
  try {
    const Tensor found = load_npy(file.holding(data, size));
    fuzz::require(static_cast<std::uint64_t>(found.elements()) * size_of(found.dtype()) <= size, "more than the file");
    save_npy(folder / "again.npy", found, {.overwrite = true});
    fuzz::require(fuzz::same(load_npy(folder / "again.npy"), found), "other bits after saving and loading");
  } catch (const FileError& error) {
    fuzz::require_printable(error.what());
  }
  return 0;
}
