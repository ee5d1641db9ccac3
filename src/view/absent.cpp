// The page needs zlib and nlohmann-json, which this build does not have.
#include "headway/view.h"

namespace headway {

void write_view(const std::filesystem::path&, ConstTensorView, ConstTensorView, const AttentionOptions&,
                const ViewRequest&) {
  throw Unsupported("write_view: this build has no zlib or no nlohmann-json, which the page needs");
}

ViewPage view_page(ConstTensorView, ConstTensorView, const AttentionOptions&, const ViewRequest&, ViewSource) {
  throw Unsupported("view_page: this build has no zlib or no nlohmann-json, which the page needs");
}

}  // namespace headway
