// The system says no: memory and threads that the library asks for and does not get. refusals.cpp stands between
// the library and the system (operator new, and the linker's --wrap).
#pragma once

namespace headway::test {

enum class Refused { memory, threads };
enum class HowOften { once, from_then_on };

// While it lives, request number `nth` of this kind, from any thread, is refused; all threads' requests count.
class Refusal {
 public:
  Refusal(Refused kind, long nth, HowOften how_often);
  ~Refusal();
  Refusal(const Refusal&) = delete;
  Refusal& operator=(const Refusal&) = delete;

  bool happened() const;
};

// Blocks of operator new that are not deleted yet.
long live_blocks();

}  // namespace headway::test
