#include "method.h"

namespace headway::python {

void add_method(nb::module_& module, const std::string& signature, PyCFunction function, int flags, const char* doc) {
  // Python keeps pointers to the definition and its texts: they live as long as the process.
  const auto* name = new std::string(signature.substr(0, signature.find('(')));
  const auto* described = new std::string(signature + "\n--\n\n" + doc);
  auto* definition = new PyMethodDef{name->c_str(), function, flags, described->c_str()};
  module.attr(name->c_str()) = checked(PyCFunction_NewEx(definition, nullptr, nb::str("headway").ptr()));
}

}  // namespace headway::python
