// The page that shows attention, from a small server on this machine: the sockets for a LiveView, which makes the
// answers. It listens on the loopback address only.
#pragma once

#include <memory>
#include <string>

#include "headway/view.h"

namespace headway::cli {

// The view must outlive it.
class ViewServer {
 public:
  // Listens on `port`, or on any free one where it is 0; Failure if that cannot be had.
  ViewServer(const LiveView& view, int port);
  ~ViewServer();  // stops serving
  ViewServer(const ViewServer&) = delete;
  ViewServer& operator=(const ViewServer&) = delete;

  const std::string& address() const;  // http://127.0.0.1:PORT/RANDOM/

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace headway::cli
