// The text of an exception.
#pragma once

#include <exception>
#include <string>

namespace headway::test {

// Of the Error that action throws.
template <class Error, class Action>
std::string error_text(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another exception: ") + error.what();
  }
  return "no error";
}

}  // namespace headway::test
