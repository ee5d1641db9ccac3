// The page from a server on this machine, over cpp-httplib.
#include "view_server.h"

#include <httplib.h>

#include <charconv>
#include <chrono>
#include <random>
#include <thread>

#include "headway/headway.h"
#include "text.h"

namespace headway::cli {
namespace {

constexpr double most_pairs = 0x1p28;  // of a part: what a machine computes while someone waits
constexpr std::int64_t most_cells = 1024;

// A whole number that is all of the text.
bool read(const httplib::Request& request, const char* name, std::int64_t& number) {
  const std::string text = request.get_param_value(name);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return !text.empty() && error == std::errc{} && end == text.data() + text.size();
}

std::string random_word() {
  static constexpr char letters[] = "abcdefghijklmnopqrstuvwxyz234567";
  std::random_device random;
  std::string word;
  for (int n = 0; n < 26; ++n) {  // 130 bits
    word += letters[random() & 31];
  }
  return word;
}

}  // namespace

struct ViewServer::State {
  State(ConstTensorView q, ConstTensorView k, const AttentionOptions& given, const ViewRequest& request)
      : query(q), key(k), options(given) {
    ViewPage made = view_page(query, key, options, request, ViewSource::server);
    page = std::move(made.text);
    lse = std::move(made.lse);
    options.progress = {};
    const std::string word = random_word();
    server.Get("/" + word + "/", [this](const httplib::Request&, httplib::Response& response) {
      response.set_content(page, "text/html; charset=utf-8");
    });
    server.Get("/" + word + "/tile",
               [this](const httplib::Request& asked, httplib::Response& response) { answer_tile(asked, response); });
    const int port = server.bind_to_any_port("127.0.0.1");
    if (port < 0) {
      throw Failure("no port of this machine could be opened");
    }
    host = text("127.0.0.1:", port);
    address = text("http://", host, "/", word, "/");
    // A page of another name that resolves to this machine must not read it.
    server.set_pre_routing_handler([this](const httplib::Request& asked, httplib::Response& response) {
      response.set_header("Cache-Control", "no-store");
      response.set_header("X-Content-Type-Options", "nosniff");
      response.set_header("Cross-Origin-Resource-Policy", "same-origin");
      if (asked.get_header_value("Host") == host) {
        return httplib::Server::HandlerResponse::Unhandled;
      }
      response.status = 403;
      return httplib::Server::HandlerResponse::Handled;
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

  // Mean, then largest weight of each cell of a part, as f32. 204 for a part that would take too long.
  void answer_tile(const httplib::Request& request, httplib::Response& response) const {
    Rectangle part;
    std::int64_t head = 0, row_cell = 0, key_cell = 0;
    const bool whole = read(request, "head", head) && read(request, "r0", part.row_begin) &&
                       read(request, "r1", part.row_end) && read(request, "k0", part.key_begin) &&
                       read(request, "k1", part.key_end) && read(request, "rc", row_cell) &&
                       read(request, "kc", key_cell);
    const std::int64_t heads = lse.size(1);
    const std::int64_t rows = part.row_end - part.row_begin, columns = part.key_end - part.key_begin;
    if (!whole || head < 0 || row_cell < 1 || key_cell < 1 || part.row_begin < 0 || part.key_begin < 0 || rows < 1 ||
        columns < 1 || rows / row_cell > most_cells || columns / key_cell > most_cells) {
      response.status = 400;
      return;
    }
    if (static_cast<double>(rows) * static_cast<double>(columns) > most_pairs) {
      response.status = 204;
      return;
    }
    try {
      const TileMap map = tile_map(query, key, lse, head / heads, head % heads, part, row_cell, key_cell, options);
      std::string body;
      for (const Tensor* numbers : {&map.mean, &map.max}) {
        const Tensor floats = convert(*numbers, DType::f32);
        body.append(static_cast<const char*>(floats.data()), static_cast<std::size_t>(floats.elements()) * 4);
      }
      response.set_content(body, "application/octet-stream");
    } catch (const Error&) {  // a head, rows or keys that are not there
      response.status = 400;
    }
  }

  ConstTensorView query, key;
  AttentionOptions options;
  Tensor lse;
  std::string page, host, address;
  httplib::Server server;
  std::thread thread;
};

ViewServer::ViewServer(ConstTensorView query, ConstTensorView key, const AttentionOptions& options,
                       const ViewRequest& request)
    : state_(std::make_unique<State>(query, key, options, request)) {}

ViewServer::~ViewServer() = default;

const std::string& ViewServer::address() const { return state_->address; }

}  // namespace headway::cli
