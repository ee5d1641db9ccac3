// The line on the terminal that shows how far a long call is; headway._progress draws it.
#pragma once

#include "errors.h"

namespace headway::python {

class ProgressBar {
 public:
  // `wanted` is None (on a terminal only), True or False.
  explicit ProgressBar(nb::handle wanted);
  ~ProgressBar();  // wipes the line
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  nb::handle callable() const { return bar_; }  // None where nothing is drawn

 private:
  nb::object bar_;
};

}  // namespace headway::python
