// A server's inner loop: random requests over one paged cache, in batches that change at every step. Prompts come in
// chunks beside requests that write one token a step; a request that finds no page waits, or starts again later. Keys,
// values and queries are random, as there is no model: what is timed is the cache and attention over it.
//
//   example_serve [--requests 64] [--pages 512] [--page-size 16] [--heads 16] [--kv-heads 4] [--head-dim 64] [--batch
//   16]
//
// On a terminal a line shows how it goes; in a pipe there is only the report.
#include <unistd.h>

#include <deque>
#include <map>
#include <utility>

#include "support.h"

namespace {

using namespace headway;
using Clock = std::chrono::steady_clock;

struct Settings {
  std::map<std::string, std::int64_t> numbers = {{"requests", 64}, {"pages", 512},   {"page-size", 16}, {"heads", 16},
                                                 {"kv-heads", 4},  {"head-dim", 64}, {"batch", 16}};
  std::int64_t operator[](const std::string& name) const { return numbers.at(name); }
};

Settings read_settings(int count, char** words) {
  Settings settings;
  for (int i = 1; i < count; i += 2) {
    const std::string name = std::string(words[i]).substr(std::min<std::size_t>(2, std::string(words[i]).size()));
    const auto found = settings.numbers.find(name);
    if (found == settings.numbers.end() || i + 1 == count || std::atoll(words[i + 1]) < 1) {
      throw InvalidArgument("expected --NAME NUMBER with a number of 1 or more, found " + std::string(words[i]));
    }
    found->second = std::atoll(words[i + 1]);
  }
  return settings;
}

struct Request {
  std::int64_t number = 0;           // decides its tokens
  std::int64_t prompt = 0, end = 0;  // tokens of the prompt, and in the end
  std::int64_t id = -1;              // in the cache
  std::int64_t done = 0;             // tokens in the cache
};

// Rows that stand for a model's: token t of request r is row (7919 r + t) of a pool.
class Rows {
 public:
  Rows(std::int64_t heads, std::int64_t width, unsigned seed)
      : pool_(example::randn({4096, heads, width}, DType::f32, seed)) {}
  void copy_to(const Request& request, std::int64_t begin, std::int64_t end, TensorView to) const {
    for (std::int64_t t = begin; t < end; ++t) {
      copy(pool_.view().select(0, (7919 * request.number + t) % 4096), to.select(0, t - begin));
    }
  }

 private:
  Tensor pool_;
};

class Server {
 public:
  explicit Server(const Settings& settings)
      : settings_(settings),
        cache_({.pages = settings["pages"],
                .page_size = settings["page-size"],
                .kv_heads = settings["kv-heads"],
                .head_dim = settings["head-dim"],
                .rope = RopeConfig{}}),
        query_(settings["heads"], settings["head-dim"], 1),
        key_(settings["kv-heads"], settings["head-dim"], 2),
        value_(settings["kv-heads"], settings["head-dim"], 3) {
    std::mt19937_64 random(7);
    const std::int64_t longest = settings["pages"] * settings["page-size"];
    for (std::int64_t number = 0; number < settings["requests"]; ++number) {
      const auto prompt = static_cast<std::int64_t>(16 + random() % 400);
      const std::int64_t end = prompt + static_cast<std::int64_t>(8 + random() % 64);
      waiting_.push_back({.number = number, .prompt = std::min(prompt, longest - 1), .end = std::min(end, longest)});
    }
  }

  // All requests, to their ends.
  void run() {
    const auto start = Clock::now();
    while (!waiting_.empty() || !running_.empty()) {
      admit();
      const auto begin = Clock::now();
      step();
      const std::chrono::duration<double> took = Clock::now() - begin, since = Clock::now() - start;
      latencies_.push_back(took.count());
      seconds_ = since.count();
      show();
    }
  }

  // Whether the last result of a sequence is what attention gives on its own keys and values, bit for bit.
  bool last_is_exact() const {
    Tensor rows[2] = {Tensor({last_.end, settings_["kv-heads"], settings_["head-dim"]}),
                      Tensor({last_.end, settings_["kv-heads"], settings_["head-dim"]})};
    Tensor query({1, settings_["heads"], settings_["head-dim"]}), positions({last_.end}, DType::i64);
    key_.copy_to(last_, 0, last_.end, rows[0]);
    value_.copy_to(last_, 0, last_.end, rows[1]);
    query_.copy_to(last_, last_.end - 1, last_.end, query);
    for (std::int64_t t = 0; t < last_.end; ++t) {
      positions.at<std::int64_t>({t}) = t;
    }
    const auto by_head = [](ConstTensorView view) { return view.transpose(0, 1).unsqueeze(0); };
    const Tensor turned_key = rope(by_head(rows[0]), positions);
    const Tensor turned_query = rope(by_head(query), positions.view().slice(0, last_.end - 1, last_.end));
    const Tensor out = attention(turned_query, turned_key, by_head(rows[1]));
    return std::equal(out.as<float>(), out.as<float>() + out.elements(), last_out_.as<float>());
  }

  void report() const {
    std::vector<double> sorted = latencies_;
    std::sort(sorted.begin(), sorted.end());
    const auto share = [&](double p) { return 1e3 * sorted[static_cast<std::size_t>(p * double(sorted.size() - 1))]; };
    std::cout << settings_["requests"] << " requests, " << tokens_ << " tokens in " << latencies_.size() << " steps, "
              << restarts_ << " started again\n"
              << std::fixed << std::setprecision(0) << double(tokens_) / seconds_ << " tokens/s, at most "
              << most_pages_ << " of " << settings_["pages"] << " pages\n"
              << std::setprecision(2) << "a step took " << share(0.5) << " ms (median), " << share(0.9) << " ms (p90), "
              << share(0.99) << " ms (p99)\n";
  }

 private:
  void admit() {
    while (!full_ && !waiting_.empty() && std::ssize(running_) < settings_["batch"]) {
      running_.push_back(waiting_.front());
      waiting_.pop_front();
      running_.back().id = cache_.add();
      running_.back().done = 0;
    }
  }

  // One chunk of each prompt, one token of each other request: append them all, attend once.
  void step() {
    constexpr std::int64_t chunk = 128;
    std::vector<std::int64_t> ids, counts;
    for (const Request& request : running_) {
      ids.push_back(request.id);
      counts.push_back(request.done < request.prompt ? std::min(chunk, request.prompt - request.done) : 1);
    }
    const Tensor bounds = cu_seqlens(counts);
    const std::int64_t total = bounds.at<std::int64_t>({std::ssize(ids)});
    Tensor query({total, settings_["heads"], settings_["head-dim"]});
    Tensor key({total, settings_["kv-heads"], settings_["head-dim"]}), value = key.clone(), out = query.clone();
    for (std::size_t i = 0; i < running_.size(); ++i) {
      const auto begin = bounds.as<std::int64_t>()[i], end = bounds.as<std::int64_t>()[i + 1];
      const Request& request = running_[i];
      query_.copy_to(request, request.done, request.done + counts[i], query.view().slice(0, begin, end));
      key_.copy_to(request, request.done, request.done + counts[i], key.view().slice(0, begin, end));
      value_.copy_to(request, request.done, request.done + counts[i], value.view().slice(0, begin, end));
    }
    try {
      cache_.append(ids, {.key = key, .value = value, .cu_seqlens = bounds});
    } catch (
        const OutOfPages&) {  // nothing has changed: the newest request gives its pages back, and starts again later
      cache_.remove(running_.back().id);
      waiting_.push_front(running_.back());
      running_.pop_back();
      ++restarts_;
      full_ = true;
      return;
    }
    cache_.attend_packed(ids, query, bounds, out);
    most_pages_ = std::max(most_pages_, settings_["pages"] - cache_.free_pages());
    tokens_ += total;
    finish(counts, bounds, out);
  }

  void finish(const std::vector<std::int64_t>& counts, const Tensor& bounds, const Tensor& out) {
    std::vector<Request> going;
    for (std::size_t i = 0; i < running_.size(); ++i) {
      Request& request = running_[i];
      request.done += counts[i];
      if (request.done < request.end) {
        going.push_back(request);
        continue;
      }
      const std::int64_t end = bounds.as<std::int64_t>()[i + 1];
      last_ = request;
      last_out_ = convert(out.view().slice(0, end - 1, end), DType::f32);
      cache_.remove(request.id);
      full_ = false;
      ++finished_;
    }
    running_ = std::move(going);
  }

  void show() const {
    static const bool on_terminal = ::isatty(STDERR_FILENO) == 1;
    if (on_terminal) {
      std::cerr << "\r" << finished_ << " of " << settings_["requests"] << " requests, " << running_.size()
                << " running, " << settings_["pages"] - cache_.free_pages() << " pages, " << std::fixed
                << std::setprecision(0) << double(tokens_) / seconds_ << " tokens/s, " << std::setprecision(1)
                << 1e3 * latencies_.back() << " ms a step   " << (waiting_.empty() && running_.empty() ? "\n" : "")
                << std::flush;
    }
  }

  Settings settings_;
  KVCache cache_;
  Rows query_, key_, value_;
  std::deque<Request> waiting_;
  std::vector<Request> running_;
  std::vector<double> latencies_;  // of each step, in seconds
  double seconds_ = 0;
  bool full_ = false;  // nobody comes in until somebody has finished
  std::int64_t tokens_ = 0, finished_ = 0, restarts_ = 0, most_pages_ = 0;
  Request last_;  // the request that finished last, and the result of its last token
  Tensor last_out_;
};

}  // namespace

int main(int count, char** words) try {
  Server server(read_settings(count, words));
  server.run();
  server.report();
  const bool exact = server.last_is_exact();
  std::cout << "the last token of the last request: " << (exact ? "the bits" : "NOT the bits")
            << " of attention alone\n";
  return exact ? 0 : 1;
} catch (const Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
