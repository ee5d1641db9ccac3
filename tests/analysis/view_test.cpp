// The page that shows attention: what is in the file, and what is refused.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "headway/headway.h"
#include "support/inputs.h"

namespace headway::test {
namespace {

namespace fs = std::filesystem;

class View : public testing::Test {
 protected:
  View() : folder_(fs::temp_directory_path() / ("headway-view-" + std::to_string(::getpid()))) {
    fs::create_directories(folder_);
  }
  ~View() override { fs::remove_all(folder_); }

  fs::path file(const char* name) const { return folder_ / name; }
  std::string text_of(const char* name) const {
    std::stringstream text;
    text << std::ifstream(file(name)).rdbuf();
    return text.str();
  }

  Inputs inputs_ = random_inputs({.batch = 1, .heads = 2, .kv_heads = 1, .queries = 6, .keys = 6});

 private:
  fs::path folder_;
};

std::int64_t count(const std::string& text, const std::string& part) {
  std::int64_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST_F(View, is_one_page_with_a_policy_against_everything_foreign) {
  write_view(file("a.html"), inputs_.q, inputs_.k);
  const std::string page = text_of("a.html");
  EXPECT_EQ(page.rfind("<!doctype html>", 0), 0u);
  EXPECT_NE(page.find("default-src 'none'"), std::string::npos);
  EXPECT_NE(page.find("connect-src 'none'"), std::string::npos);
  EXPECT_EQ(page.find("http://"), std::string::npos);
  EXPECT_EQ(page.find("https://"), std::string::npos);
  EXPECT_EQ(page.find("@DATA@"), std::string::npos);
  write_view(file("b.html"), inputs_.q, inputs_.k);
  const auto nonce = [](const std::string& text) { return text.substr(text.find("nonce-"), 38); };
  EXPECT_NE(nonce(page), nonce(text_of("b.html")));
}

TEST_F(View, tokens_cannot_leave_the_data) {
  ViewRequest request;
  request.key_tokens = {"</script><script>alert(1)</script>", "<!--", "\"", "\\", "a\nb", "\xff\xfe"};
  request.title = "</title><script>";
  write_view(file("a.html"), inputs_.q, inputs_.k, {}, request);
  const std::string page = text_of("a.html");
  EXPECT_EQ(count(page, "<script"), 2);  // the data and the page's own
  EXPECT_EQ(count(page, "</script"), 2);
  EXPECT_EQ(count(page, "alert(1)"), 1);
  EXPECT_NE(page.find("\\u003c/script>\\u003cscript>alert(1)"), std::string::npos);
}

TEST_F(View, of_a_long_text_stays_small) {
  const Inputs inputs =
      random_inputs({.batch = 1, .heads = 32, .kv_heads = 1, .queries = 3000, .keys = 3000, .head_dim = 4});
  write_view(file("a.html"), inputs.q, inputs.k, {.window = Window{100, 100}});
  EXPECT_LT(fs::file_size(file("a.html")), 5'000'000u);
}

TEST_F(View, of_layers_names_layers_and_heads) {
  const std::vector<ViewLayer> layers{{inputs_.q, inputs_.k}, {inputs_.q, inputs_.k, {.causal = Causal::square}}};
  write_view(file("a.html"), layers);
  const std::string page = text_of("a.html");
  EXPECT_NE(page.find("\"layer 0, head 0\""), std::string::npos);
  EXPECT_NE(page.find("\"layer 1, head 1\""), std::string::npos);
  EXPECT_NE(page.find("options differ"), std::string::npos);
  const Inputs shorter = random_inputs({.batch = 1, .heads = 2, .kv_heads = 1, .queries = 6, .keys = 5});
  const std::vector<ViewLayer> unlike{{inputs_.q, inputs_.k}, {shorter.q, shorter.k}};
  EXPECT_TRUE(throws<InvalidArgument>("write_view", {"layer 1 has 6 queries and 5 keys", "expected 6 and 6"},
                                      [&] { write_view(file("b.html"), unlike); }));
  EXPECT_TRUE(throws<InvalidArgument>("write_view", {"nothing to show"},
                                      [&] { write_view(file("b.html"), std::span<const ViewLayer>()); }));
}

TEST_F(View, says_what_is_wrong_and_leaves_nothing_behind) {
  const auto with = [&](const ViewRequest& request) {
    return [&, request] { write_view(file("a.html"), inputs_.q, inputs_.k, {}, request); };
  };
  ViewRequest few, names;
  few.key_tokens = {"a", "b"};
  names.head_names = {"only one"};
  EXPECT_TRUE(throws<InvalidArgument>("write_view", {"key_tokens has 2", "expected 6"}, with(few)));
  EXPECT_TRUE(throws<InvalidArgument>("write_view", {"head_names has 1", "expected 2"}, with(names)));
  EXPECT_TRUE(throws<InvalidArgument>("write_view", {"nothing to show"}, [&] {
    write_view(file("a.html"), inputs_.q, Tensor({1, 1, 0, 8}));
  }));
  EXPECT_TRUE(fs::is_empty(file("").parent_path()));
  write_view(file("a.html"), inputs_.q, inputs_.k);
  EXPECT_ANY_THROW(with({})());
  ViewRequest again;
  again.overwrite = true;
  with(again)();
}

TEST_F(View, that_is_stopped_leaves_nothing_behind) {
  const Progress stop = [](double) { return false; };
  EXPECT_THROW(write_view(file("a.html"), inputs_.q, inputs_.k, {.progress = stop}), Cancelled);
  ViewRequest request;
  request.progress = stop;
  EXPECT_THROW(write_view(file("a.html"), inputs_.q, inputs_.k, {}, request), Cancelled);
  EXPECT_TRUE(fs::is_empty(file("").parent_path()));
}

}  // namespace
}  // namespace headway::test
