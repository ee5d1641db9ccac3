// headway view writes a page, or serves it.
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

TEST_F(ViewCommand, says_what_is_wrong) {
  save_random("q.npy", {5, 8}, 1);
  save_tokens("t.txt", 4);
  const auto fails = [&](const Arguments& more, int code, const std::string& part) {
    Arguments arguments = {"view", "q.npy", "q.npy"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    expect_failure(run(arguments), code, "headway view", part);
  };
  fails({}, 2, "either -o FILE or --serve");
  fails({"-o", "a.html", "--serve"}, 2, "either -o FILE or --serve");
  fails({"-o", "a.png"}, 2, ".html");
  fails({"-o", "a.html", "--tokens", "t.txt"}, 2, "key_tokens has 4");
  fails({"-o", "a.html", "--tokens", "none.txt"}, 1, "cannot be read");
  EXPECT_EQ(files(), (std::set<std::string>{"q.npy", "t.txt"}));
}

}  // namespace
}  // namespace headway::test
