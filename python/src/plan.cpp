// Plan: what explain() returns.

#include <cmath>

#include "docstrings.h"
#include "functions.h"

namespace headway::python {
namespace {

// Counts are whole numbers, which a double holds for long enough.
template <double Plan::*Count>
nb::object count(const Plan& plan) {
  return checked(PyLong_FromDouble(std::round(plan.*Count)));
}

std::string repr(const Plan& plan) {
  return text("<Plan: ", plan.operation, " on ", name(plan.engine), ", ", plan.kernel, ", ", plan.flops, " FLOP>");
}

nb::list passed_over(const Plan& plan) {
  nb::list result;
  for (const Plan::PassedOver& passed : plan.passed_over) {
    result.append(nb::make_tuple(nb::str(name(passed.engine)), nb::str(passed.reason.c_str())));
  }
  return result;
}

nb::list passed_kernels(const Plan& plan) {
  nb::list result;
  for (const Plan::PassedKernel& passed : plan.passed_kernels) {
    result.append(nb::make_tuple(nb::str(passed.kernel.c_str()), nb::str(passed.reason.c_str())));
  }
  return result;
}

}  // namespace

void add_plan(nb::module_& module) {
  nb::class_<Plan> plan(module, "Plan", docs::plan);
  plan.def_prop_ro("engine", [](const Plan& self) { return std::string(name(self.engine)); })
      .def_ro("operation", &Plan::operation)
      .def_ro("kernel", &Plan::kernel)
      .def_ro("instruction_set", &Plan::instruction_set)
      .def_ro("shape", &Plan::shape)
      .def_ro("options", &Plan::options)
      .def_ro("query_block", &Plan::query_block)
      .def_ro("key_block", &Plan::key_block)
      .def_ro("tasks", &Plan::tasks)
      .def_ro("threads", &Plan::threads)
      .def_prop_ro("pairs", &count<&Plan::pairs>)
      .def_prop_ro("all_pairs", &count<&Plan::all_pairs>)
      .def_prop_ro("flops", &count<&Plan::flops>)
      .def_prop_ro("bytes", &count<&Plan::bytes>)
      .def_prop_ro("scratch_bytes", &count<&Plan::scratch_bytes>)
      .def_prop_ro("passed_over", &passed_over)
      .def_prop_ro("passed_kernels", &passed_kernels)
      .def("__str__", [](const Plan& self) { return to_string(self); })
      .def("__repr__", &repr);
  plan.attr("__module__") = "headway";
}

}  // namespace headway::python
