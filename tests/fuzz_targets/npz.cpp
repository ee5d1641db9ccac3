// .npz files: each loads, and then saves and loads again to the same bits, or is a FileError.
#include "support.h"

using namespace headway;

namespace {

void save_and_load_again(const NamedTensors& found, bool compress) {
  static const fuzz::Folder folder;
  save_npz(folder / "again.npz", NamedViews(found.begin(), found.end()), {.overwrite = true, .compress = compress});
  fuzz::require(fuzz::same(load_npz(folder / "again.npz"), found), "other bits after saving and loading");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const fuzz::InputAsFile file;
  constexpr std::uint64_t largest_ratio = 1032;  // of deflate
  try {
    const NamedTensors found = load_npz(file.holding(data, size));
    fuzz::require(fuzz::bytes_of(found) <= largest_ratio * size, "more than the file can hold");
    save_and_load_again(found, false);
    save_and_load_again(found, true);
  } catch (const FileError& error) {
    fuzz::require_printable(error.what());
  }
  return 0;
}
