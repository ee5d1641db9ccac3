// The data that a page shows of layers of attention, as fine as the size limit allows.
#pragma once

#include <span>
#include <vector>

#include "core/problem.h"
#include "headway/view.h"
#include "view/fine_map.h"
#include "view/page.h"

namespace headway::view {

// The problems of the layers, checked to be alike enough for one page.
std::vector<Problem> problems_of(const char* operation, std::span<const ViewLayer> layers, const ViewRequest& request);

struct Analyzed {
  Content content;
  std::vector<Tensor> lse;  // [B,H,Sq] of each layer
};

// Analyzes the layers, with `request.progress` over all of them. A fine map that is not empty is filled in the same
// pass, and the page's own map is merged from it.
Analyzed analyzed(std::span<const ViewLayer> layers, std::span<const Problem> problems, const ViewRequest& request,
                  FineMap& fine);

std::int64_t heads_in(std::span<const Problem> problems);

}  // namespace headway::view
