// The page needs zlib and nlohmann-json, which this build does not have.
#include "headway/view.h"

namespace headway {
namespace {

[[noreturn]] void refuse(const char* operation) {
  throw Unsupported(std::string(operation) + ": this build has no zlib or no nlohmann-json, which the page needs");
}

}  // namespace

void write_view(const std::filesystem::path&, std::span<const ViewLayer>, const ViewRequest&) { refuse("write_view"); }

void write_view(const std::filesystem::path&, ConstTensorView, ConstTensorView, const AttentionOptions&,
                const ViewRequest&) {
  refuse("write_view");
}

struct LiveView::State {};

LiveView::LiveView(std::span<const ViewLayer>, const ViewRequest&) { refuse("LiveView"); }

LiveView::~LiveView() = default;

std::string LiveView::address(std::string_view) const { return {}; }

ViewAnswer LiveView::answer(std::string_view, std::string_view, std::string_view) const { return {}; }

}  // namespace headway
