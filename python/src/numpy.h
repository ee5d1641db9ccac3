// What is used of NumPy, through Python alone: no NumPy headers, so that one build serves every NumPy.
#pragma once

#include <optional>

#include "dlpack.h"
#include "errors.h"

namespace headway::python {

// Looked up once, when the module is imported; never freed.
struct Numpy {
  nb::object ndarray, empty, asarray, masked_array;
  nb::object float32, float64, float16, boolean, int32, int64;  // dtypes

  // The dtype that NumPy itself has for these; none for bf16.
  nb::handle dtype(DType type) const;
};

const Numpy& numpy();
void import_numpy();

bool is_ndarray(nb::handle object);

// The element type of a NumPy dtype; none for what has no place in DLPack, or is not in this machine's byte order.
std::optional<dlpack::Type> element_type(nb::handle dtype);

}  // namespace headway::python
