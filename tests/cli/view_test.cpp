// headway view writes a page, or serves it.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <fstream>

#include "cli_support.h"

namespace headway::test {
namespace {

class ViewCommand : public CommandTest {
 protected:
  void save_tokens(const std::string& name, int count) const {
    std::ofstream tokens(file(name));
    for (int n = 0; n < count; ++n) tokens << "word" << n << "\n";
  }
};

TEST_F(ViewCommand, writes_a_page_with_tokens) {
  save_random("q.npy", {2, 5, 8}, 1);
  save_tokens("t.txt", 5);
  const Finished finished = run({"view", "q.npy", "q.npy", "-o", "a.html", "--tokens", "t.txt", "--causal"});
  ASSERT_EQ(finished.code, 0) << finished.err;
  EXPECT_EQ(finished.out.rfind("a.html  ", 0), 0u) << finished.out;
  std::ifstream page(file("a.html"));
  const std::string text((std::istreambuf_iterator<char>(page)), {});
  EXPECT_NE(text.find("\"word4\""), std::string::npos);
  EXPECT_NE(text.find("causal"), std::string::npos);
}

// The first line of the answer to a plain GET, from a server on this machine.
std::string status_of(int port, const std::string& target, const std::string& host) {
  const int connection = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string answer;
  if (::connect(connection, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    const std::string request = "GET " + target + " HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n";
    EXPECT_EQ(::write(connection, request.data(), request.size()), static_cast<ssize_t>(request.size()));
    char buffer[4096];
    for (ssize_t got = 0; (got = ::read(connection, buffer, sizeof(buffer))) > 0;) {
      answer.append(buffer, static_cast<std::size_t>(got));
    }
  }
  ::close(connection);
  return answer.substr(0, answer.find('\r'));
}

TEST_F(ViewCommand, serves_the_page_until_ctrl_c_and_refuses_strangers) {
  save_random("q.npy", {2, 5, 8}, 1);
  bool asked = false;
  const Finished finished =
      run_on_terminal({"view", "q.npy", "q.npy", "--serve"}, [&](const std::string& so_far, int terminal, pid_t) {
        if (asked || so_far.find("Ctrl-C ends") == std::string::npos) {
          return;
        }
        asked = true;
        const std::size_t begin = so_far.find("127.0.0.1:"), slash = so_far.find('/', begin);
        const std::string host = so_far.substr(begin, slash - begin);
        const std::string path = so_far.substr(slash, so_far.find(' ', slash) - slash);
        const int port = std::stoi(host.substr(host.find(':') + 1));
        EXPECT_EQ(status_of(port, path, host), "HTTP/1.1 200 OK");
        EXPECT_EQ(status_of(port, path + "tile?head=1&r0=0&r1=5&k0=0&k1=5", host), "HTTP/1.1 200 OK");
        EXPECT_EQ(status_of(port, path + "tile?head=2&r0=0&r1=5&k0=0&k1=5", host), "HTTP/1.1 400 Bad Request");
        EXPECT_EQ(status_of(port, path, "example.org"), "HTTP/1.1 403 Forbidden");
        EXPECT_EQ(status_of(port, "/", host), "HTTP/1.1 404 Not Found");
        EXPECT_EQ(status_of(port, path + "../q.npy", host), "HTTP/1.1 404 Not Found");
        EXPECT_EQ(::write(terminal, "\x03", 1), 1);
      });
  if (finished.out.find("without cpp-httplib") != std::string::npos) {
    GTEST_SKIP() << "built without cpp-httplib";
  }
  EXPECT_TRUE(asked) << finished.out;
  EXPECT_EQ(finished.code, 0);
  EXPECT_EQ(files(), std::set<std::string>{"q.npy"});
}

TEST_F(ViewCommand, without_a_path_writes_attention_html_in_place_of_an_earlier_page_only) {
  save_random("q.npy", {2, 5, 8}, 1);
  for (int time = 0; time < 2; ++time) {
    const Finished finished = run({"view", "q.npy", "q.npy"});
    ASSERT_EQ(finished.code, 0) << finished.err;
    EXPECT_EQ(finished.out.rfind("attention.html  ", 0), 0u) << finished.out;
  }
  expect_failure(run({"view", "q.npy", "q.npy", "-o", "attention.html"}), 1, "headway view",
                 "attention.html exists; --force replaces it");
  std::ofstream(file("attention.html")) << "<p>notes of somebody</p>";
  expect_failure(run({"view", "q.npy", "q.npy"}), 1, "headway view", "attention.html exists; --force replaces it");
}

// A port that was free a moment ago.
int free_port() {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  EXPECT_EQ(::bind(listener, reinterpret_cast<const sockaddr*>(&address), size), 0);
  EXPECT_EQ(::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size), 0);
  ::close(listener);
  return ntohs(address.sin_port);
}

TEST_F(ViewCommand, serves_on_the_port_that_is_asked_for) {
  save_random("q.npy", {2, 5, 8}, 1);
  const std::string port = std::to_string(free_port());
  bool seen = false;
  const Finished finished = run_on_terminal({"view", "q.npy", "q.npy", "--serve", "--port", port},
                                            [&](const std::string& so_far, int terminal, pid_t) {
                                              if (!seen && so_far.find("Ctrl-C ends") != std::string::npos) {
                                                seen = so_far.find("127.0.0.1:" + port + "/") != std::string::npos;
                                                EXPECT_EQ(::write(terminal, "\x03", 1), 1);
                                              }
                                            });
  if (finished.out.find("without cpp-httplib") != std::string::npos) {
    GTEST_SKIP() << "built without cpp-httplib";
  }
  EXPECT_TRUE(seen) << finished.out;
}

TEST_F(ViewCommand, that_is_interrupted_leaves_no_file) {
  save_random("x.npy", {60'000, 4}, 1);
  bool pressed = false;
  const Finished finished = run_on_terminal({"view", "x.npy", "x.npy", "-o", "a.html", "--engine", "reference"},
                                            [&](const std::string& so_far, int terminal, pid_t) {
                                              if (!pressed && so_far.find(" %") != std::string::npos) {
                                                pressed = ::write(terminal, "\x03", 1) == 1;
                                              }
                                            });
  EXPECT_TRUE(pressed);
  EXPECT_EQ(finished.code, 130);
  EXPECT_EQ(files(), std::set<std::string>{"x.npy"});
}

TEST_F(ViewCommand, says_what_is_wrong) {
  save_random("q.npy", {5, 8}, 1);
  save_tokens("t.txt", 4);
  const auto fails = [&](const Arguments& more, int code, const std::string& part) {
    Arguments arguments = {"view", "q.npy", "q.npy"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    expect_failure(run(arguments), code, "headway view", part);
  };
  fails({"-o", "a.html", "--serve"}, 2, "either -o FILE or --serve, found both");
  fails({"-o", "a.png"}, 2, ".html");
  fails({"--port", "8000"}, 2, "--port is for --serve, which is not given");
  fails({"--serve", "--port", "0"}, 2, "expected a port, 1 to 65535, found 0");
  fails({"--serve", "--port", "99999999999"}, 2, "expected a port, 1 to 65535, found 99999999999");
  fails({"-o", "a.html", "--tokens", "t.txt"}, 2, "--tokens: t.txt has 4 lines, expected 5, one for each key");
  fails({"-o", "a.html", "--query-tokens", "t.txt"}, 2, "--query-tokens: t.txt has 4 lines, expected 5, one for each");
  fails({"-o", "a.html", "--tokens", "the cat"}, 1, "--tokens: the cat: cannot be read; expected a text file");
  EXPECT_EQ(files(), (std::set<std::string>{"q.npy", "t.txt"}));
}

}  // namespace
}  // namespace headway::test
