// The line on the terminal that shows how far a long call is; headway._progress draws it.
#pragma once

#include "errors.h"

namespace headway::python {

class ProgressBar {
 public:
  // `wanted` is None (on a terminal and in a notebook), True or False; anything else is an error of `operation`.
  ProgressBar(const char* operation, nb::handle wanted);
  ~ProgressBar();  // wipes the line
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  nb::handle callable() const { return bar_; }  // None where nothing is drawn

 private:
  nb::object bar_;
};

}  // namespace headway::python
