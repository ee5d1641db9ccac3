// The page from a server on this machine, over cpp-httplib.
#include "view_server.h"

#include <httplib.h>

#include <chrono>
#include <thread>

#include "text.h"

namespace headway::cli {

struct ViewServer::State {
  State(const LiveView& view, int wanted) {
    int port = wanted;
    if (wanted == 0) {
      port = server.bind_to_any_port("127.0.0.1");
      if (port < 0) {
        throw Failure("no port of this machine could be opened");
      }
    } else if (!server.bind_to_port("127.0.0.1", wanted)) {
      throw Failure(text("--port: cannot listen on port ", wanted, ": in use, or not for this user"));
    }
    const std::string host = text("127.0.0.1:", port);
    address = view.address(host);
    server.Get(".*", [&view, host](const httplib::Request& asked, httplib::Response& response) {
      const ViewAnswer answer = view.answer(asked.target, asked.get_header_value("Host"), host);
      response.status = answer.status;
      for (const auto& [name, value] : answer.headers) {
        response.set_header(name, value);
      }
      response.body = answer.body;
    });
    server.new_task_queue = [] { return new httplib::ThreadPool(4); };
    thread = std::thread([this] { server.listen_after_bind(); });
    while (!server.is_running()) {  // stop() before that would be lost
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  ~State() {
    server.stop();
    thread.join();
  }

  std::string address;
  httplib::Server server;
  std::thread thread;
};

ViewServer::ViewServer(const LiveView& view, int port) : state_(std::make_unique<State>(view, port)) {}

ViewServer::~ViewServer() = default;

const std::string& ViewServer::address() const { return state_->address; }

}  // namespace headway::cli
