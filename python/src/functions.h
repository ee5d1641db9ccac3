// The attention functions as Python calls them.
#pragma once

#include "errors.h"

namespace headway::python {

void add_functions(nb::module_& module);
void add_torch_calls(nb::module_& module);
void add_torch_eager(nb::module_& module);
void add_analysis(nb::module_& module);
void add_view(nb::module_& module);
void add_plan(nb::module_& module);
void add_layer(nb::module_& module);
void add_masks(nb::module_& module);
void add_threads(nb::module_& module);
void add_trace(nb::module_& module);
void add_paged(nb::module_& module);
void add_rope(nb::module_& module);
void add_cache(nb::module_& module);
void add_distributed(nb::module_& module);
void add_ffi_handlers(nb::module_& module);

}  // namespace headway::python
