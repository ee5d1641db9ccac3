#include "view/html.h"

#include <random>

namespace headway::view {
namespace {

std::string replaced(std::string text, const std::string& mark, const std::string& with) {
  for (std::size_t at = text.find(mark); at != std::string::npos; at = text.find(mark, at + with.size())) {
    text.replace(at, mark.size(), with);
  }
  return text;
}

// Scripts without this nonce do not run; every file has a new one.
std::string nonce() {
  static constexpr char digits[] = "0123456789abcdef";
  std::random_device random;
  std::string text;
  for (int n = 0; n < 32; ++n) {
    text += digits[random() & 15];
  }
  return text;
}

}  // namespace

std::string assembled(const PageParts& parts, const std::string& data, Connect connect) {
  std::string page = replaced(parts.markup, "@CONNECT@", connect == Connect::own_server ? "'self'" : "'none'");
  page = replaced(page, "@NONCE@", nonce());
  page = replaced(page, "@STYLE@", parts.style);
  page = replaced(page, "@SCRIPT@", parts.script);
  // The data contains no "<", so nothing in it can end its element or begin another.
  return replaced(page, "@DATA@", replaced(data, "<", "\\u003c"));
}

}  // namespace headway::view
