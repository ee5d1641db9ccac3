#include "numpy.h"

#include <array>
#include <string>
#include <utility>

namespace headway::python {
namespace {

Numpy* imported = nullptr;

dlpack::Type type_of(dlpack::Code code, std::int64_t bytes) { return {code, static_cast<std::uint8_t>(8 * bytes), 1}; }

// For dtypes that are not one of NumPy's own objects: unusual integers, other spellings, bfloat16.
std::optional<dlpack::Type> described_type(nb::handle dtype) {
  const auto kind = nb::cast<std::string>(dtype.attr("kind"));
  const auto bytes = nb::cast<std::int64_t>(dtype.attr("itemsize"));
  if (!nb::cast<bool>(dtype.attr("isnative")) || bytes > 8) {
    return {};
  }
  if (kind == "V" && bytes == 2 && nb::cast<std::string>(dtype.attr("name")) == "bfloat16") {
    return type_of(dlpack::Code::bfloat, 2);
  }
  if (bytes == 1 && nb::cast<std::string>(dtype.attr("name")) == "float8_e4m3fn") {  // of ml_dtypes
    return type_of(dlpack::Code::float8_e4m3fn, 1);
  }
  static constexpr std::array<std::pair<char, dlpack::Code>, 4> codes = {{{'f', dlpack::Code::floating},
                                                                          {'i', dlpack::Code::integer},
                                                                          {'u', dlpack::Code::unsigned_integer},
                                                                          {'b', dlpack::Code::boolean}}};
  for (const auto& [letter, code] : codes) {
    if (kind.size() == 1 && kind[0] == letter) {
      return type_of(code, bytes);
    }
  }
  return {};
}

}  // namespace

nb::handle Numpy::dtype(DType type) const {
  switch (type) {
    case DType::f32: return float32;
    case DType::f64: return float64;
    case DType::f16: return float16;
    case DType::b8: return boolean;
    case DType::i32: return int32;
    case DType::i64: return int64;
    case DType::bf16:
    case DType::i8:
    case DType::f8e4m3: break;
  }
  return {};
}

const Numpy& numpy() { return *imported; }

void import_numpy() {
  const nb::object module = nb::module_::import_("numpy");
  const nb::object dtype = module.attr("dtype");
  imported = new Numpy{.ndarray = module.attr("ndarray"),
                       .empty = module.attr("empty"),
                       .asarray = module.attr("asarray"),
                       .masked_array = nb::module_::import_("numpy.ma").attr("MaskedArray"),
                       .float32 = dtype("float32"),
                       .float64 = dtype("float64"),
                       .float16 = dtype("float16"),
                       .boolean = dtype("bool"),
                       .int32 = dtype("int32"),
                       .int64 = dtype("int64")};
}

bool is_ndarray(nb::handle object) {
  return PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(imported->ndarray.ptr()));
}

std::optional<dlpack::Type> element_type(nb::handle dtype) {
  const Numpy& np = *imported;
  if (dtype.is(np.float32)) return type_of(dlpack::Code::floating, 4);
  if (dtype.is(np.float64)) return type_of(dlpack::Code::floating, 8);
  if (dtype.is(np.float16)) return type_of(dlpack::Code::floating, 2);
  if (dtype.is(np.boolean)) return type_of(dlpack::Code::boolean, 1);
  if (dtype.is(np.int64)) return type_of(dlpack::Code::integer, 8);
  if (dtype.is(np.int32)) return type_of(dlpack::Code::integer, 4);
  return described_type(dtype);
}

}  // namespace headway::python
