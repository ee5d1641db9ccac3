// The page that shows attention, from a small server on this machine: every zoom level of every head is computed when
// it is looked at. Only the loopback address listens; the address has a random part, and a request without it, for
// another host's name, or for anything but the page and its parts is refused.
#pragma once

#include <memory>
#include <string>

#include "headway/view.h"

namespace headway::cli {

// query, key and what the options view must stay alive and unchanged.
class ViewServer {
 public:
  ViewServer(ConstTensorView query, ConstTensorView key, const AttentionOptions& options, const ViewRequest& request);
  ~ViewServer();  // stops serving
  ViewServer(const ViewServer&) = delete;
  ViewServer& operator=(const ViewServer&) = delete;

  const std::string& address() const;  // http://127.0.0.1:PORT/RANDOM/

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace headway::cli
