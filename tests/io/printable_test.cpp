// Untrusted texts, made safe for a terminal or a log.
#include "headway/printable.h"

#include <gtest/gtest.h>

#include "files.h"

namespace headway {
namespace {

TEST(Printable, text_that_only_shows_stays_as_it_is) {
  for (const std::string text : {"", "plain ~ \\x1b", "caf\u00e9", "\u6ce8\u610f\u529b", "\U0001f600", "\u00a0",
                                 "\u200d", "\u0634\u200c\u0627", "\uffff", "\U0010ffff"}) {
    EXPECT_EQ(printable(text), text);
  }
}

TEST(Printable, control_characters_become_escapes) {
  EXPECT_EQ(printable("a\nb\tc\r"), "a\\x0ab\\x09c\\x0d");
  EXPECT_EQ(printable(std::string_view("\0\x1f\x7f", 3)), "\\x00\\x1f\\x7f");
  EXPECT_EQ(printable("\x1b[2J"), "\\x1b[2J");
  EXPECT_EQ(printable("\u0080\u009b2J\u009f"), "\\u0080\\u009b2J\\u009f");
}

TEST(Printable, characters_that_end_or_reorder_a_line_become_escapes) {
  EXPECT_EQ(printable("\u2028\u2029"), "\\u2028\\u2029");
  EXPECT_EQ(printable("\u061c\u200e\u200f"), "\\u061c\\u200e\\u200f");
  EXPECT_EQ(printable("\u202a\u202b\u202c\u202d\u202e"), "\\u202a\\u202b\\u202c\\u202d\\u202e");
  EXPECT_EQ(printable("\u2066\u2067\u2068\u2069"), "\\u2066\\u2067\\u2068\\u2069");
}

TEST(Printable, bytes_that_are_no_utf8_become_escapes_one_by_one) {
  EXPECT_EQ(printable("\x9b"), "\\x9b");                                      // CSI where a terminal reads single bytes
  EXPECT_EQ(printable("a\xc3"), "a\\xc3");                                    // the second byte is missing
  EXPECT_EQ(printable("\xc0\x8a\xe0\x80\x8a"), "\\xc0\\x8a\\xe0\\x80\\x8a");  // longer than needed
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");                    // a surrogate
  EXPECT_EQ(printable("\xf4\x90\x80\x80\xff"), "\\xf4\\x90\\x80\\x80\\xff");  // beyond Unicode
  EXPECT_EQ(printable("\xe2\x80z\u00e9"), "\\xe2\\x80z\u00e9");               // what follows is read again
}

TEST(Printable, errors_quote_names_this_way) {
  const TestFolder folder;
  expect_file_error([&] { load_npy(folder / "a\u009b2J\u202e\n\xff.npy"); },
                    {"load_npy: ", "a\\u009b2J\\u202e\\x0a\\xff.npy: cannot open: No such file or directory"});
  EXPECT_STREQ(InvalidArgument("found \x1b[31m").what(), "found \\x1b[31m");
}

}  // namespace
}  // namespace headway
