// The extension module headway._headway.
#include "functions.h"
#include "numpy.h"
#include "released.h"

NB_MODULE(_headway, module) {
  using namespace headway::python;
  // What a thread, or a library that ends later, still holds when Python ends is none of the user's concern.
  nanobind::set_leak_warnings(false);
  nanobind::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const headway::Error&) {
      set_python_error();
    }
  });
  import_numpy();
  remember_main_thread();
  add_plan(module);
  add_functions(module);
  add_torch_calls(module);
  add_torch_eager(module);
  add_analysis(module);
  add_layer(module);
  add_masks(module);
  add_threads(module);
  add_trace(module);
  add_view(module);
  add_paged(module);
  add_rope(module);
  add_cache(module);
  add_distributed(module);
  add_ffi_handlers(module);
  module.attr("__version__") = headway::version;
}
