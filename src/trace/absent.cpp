// The page needs nlohmann-json, which this build does not have.
#include "headway/trace.h"

namespace headway {

std::string trace_page(const Trace&) {
  throw Unsupported("trace_page: this build has no nlohmann-json, which the page needs");
}

void write_trace(const std::filesystem::path&, const Trace&, bool) {
  throw Unsupported("write_trace: this build has no nlohmann-json, which the page needs");
}

}  // namespace headway
