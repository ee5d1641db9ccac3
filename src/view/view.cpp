// The page as a file.
#include "headway/view.h"

#include "core/out_of_memory.h"
#include "io/output_file.h"
#include "view/content.h"

namespace headway {

void write_view(const std::filesystem::path& path, std::span<const ViewLayer> layers, const ViewRequest& request) try {
  const std::vector<Problem> problems = view::problems_of("write_view", layers, request);
  io::OutputFile file("write_view", path, request.overwrite);  // before the work: a target that cannot be written
  view::FineMap none;
  const std::string page = view::page_text(view::analyzed(layers, problems, request, none).content, view::Source::file);
  file.write(std::as_bytes(std::span(page)));
  file.commit();
} catch (...) {
  throw_own_error("write_view");
}

void write_view(const std::filesystem::path& path, ConstTensorView query, ConstTensorView key,
                const AttentionOptions& options, const ViewRequest& request) try {
  ViewRequest with_progress = request;
  if (!request.progress) {
    with_progress.progress = options.progress;
  }
  const ViewLayer layer{query, key, options};
  write_view(path, std::span(&layer, 1), with_progress);
} catch (...) {
  throw_own_error("write_view");
}

}  // namespace headway
