// The analysis on a device in a build without the CUDA engine. Problems on a device are refused before, with the
// reason.
#include "analysis/on_device.h"
#include "core/text.h"

namespace headway {
namespace {

[[noreturn]] void refuse(const Problem& problem) {
  throw Unsupported(text(problem.operation, ": the tensors are on ", problem.query.device(),
                         ", and the CUDA engine is not built into this library"));
}

}  // namespace

void analyze_on_device(const Problem& problem, const AnalysisRequest&, const CellTaker&, Analysis&) { refuse(problem); }

void weights_on_device(const Problem& problem, const Rectangle&, const std::optional<ConstTensorView>&, Tensor&) {
  refuse(problem);
}

void map_on_device(const Problem& problem, std::int64_t, std::int64_t, const Rectangle&, std::int64_t, std::int64_t,
                   const ConstTensorView&, TileMap&) {
  refuse(problem);
}

void mean_weights_on_device(const Problem& problem, const ConstTensorView&, const TensorView&) { refuse(problem); }

}  // namespace headway
