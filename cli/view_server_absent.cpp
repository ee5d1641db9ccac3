// The server needs cpp-httplib, which this build does not have.
#include "text.h"
#include "view_server.h"

namespace headway::cli {

struct ViewServer::State {
  std::string address;
};

ViewServer::ViewServer(const LiveView&, int) {
  throw Failure("--serve: this command was built without cpp-httplib (Debian: libcpp-httplib-dev)");
}

ViewServer::~ViewServer() = default;

const std::string& ViewServer::address() const { return state_->address; }

}  // namespace headway::cli
