// A trace as a page: what is in the file, and what is refused.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "headway/headway.h"

namespace headway::test {
namespace {

namespace fs = std::filesystem;

class TracePage : public testing::Test {
 protected:
  TracePage() : folder_(fs::temp_directory_path() / ("headway-trace-" + std::to_string(::getpid()))) {
    fs::create_directories(folder_);
    try {
      trace_page(trace(x_, x_, x_));
    } catch (const Unsupported& error) {
      skipped_ = error.what();
    }
  }
  ~TracePage() override { fs::remove_all(folder_); }
  void SetUp() override {
    if (!skipped_.empty()) GTEST_SKIP() << skipped_;
  }

  static std::int64_t count(const std::string& text, const std::string& part) {
    std::int64_t found = 0;
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
    return found;
  }

  Tensor x_ = Tensor::of<float>({2, 4}, {1, 2, 3, 4, 5, 6, 7, 8});
  fs::path folder_;
  std::string skipped_;
};

TEST_F(TracePage, is_one_page_with_a_policy_against_everything_foreign) {
  const std::string page = trace_page(trace(x_, x_, x_, {.causal = Causal::square}));
  EXPECT_EQ(page.rfind("<!doctype html>", 0), 0u);
  EXPECT_NE(page.find("default-src 'none'"), std::string::npos);
  EXPECT_NE(page.find("connect-src 'none'"), std::string::npos);
  EXPECT_EQ(page.find("http://"), std::string::npos);
  EXPECT_EQ(page.find("https://"), std::string::npos);
  for (const char* mark : {"@DATA@", "@STYLE@", "@SCRIPT@", "@NONCE@", "@CONNECT@"})
    EXPECT_EQ(page.find(mark), std::string::npos) << mark;
  EXPECT_NE(page.find("\"name\":\"masked scores\""), std::string::npos);
  EXPECT_NE(page.find("\"-Infinity\""), std::string::npos);
}

TEST_F(TracePage, tokens_cannot_leave_the_data) {
  TraceRequest request;
  request.key_tokens = {"</script><script>alert(1)</script>", "\xff\xfe"};
  request.title = "</title><script>";
  const std::string page = trace_page(trace(x_, x_, x_, {}, request));
  EXPECT_EQ(count(page, "<script"), 2);  // the data and the page's own
  EXPECT_EQ(count(page, "</script"), 2);
  EXPECT_NE(page.find("\\u003c/script>\\u003cscript>alert(1)"), std::string::npos);
}

TEST_F(TracePage, is_written_once_and_replaced_when_asked) {
  const fs::path file = folder_ / "a.html";
  const Trace found = trace(x_, x_, x_);
  write_trace(file, found);
  std::stringstream text;
  text << std::ifstream(file).rdbuf();
  EXPECT_EQ(text.str().size(), trace_page(found).size());
  EXPECT_THROW(write_trace(file, found), Error);
  write_trace(file, found, true);
  EXPECT_THROW(write_trace(folder_ / "none" / "a.html", found), Error);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
}

}  // namespace
}  // namespace headway::test
