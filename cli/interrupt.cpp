// SIGINT, SIGTERM and SIGHUP as a request to stop.
#include "interrupt.h"

#include <csignal>

#include "headway/error.h"

namespace headway::cli {
namespace {

volatile std::sig_atomic_t caught = 0;

extern "C" void remember(int signal) { caught = signal; }

void set_handlers(int flags) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction current {};
    ::sigaction(signal, nullptr, &current);
    // A signal that the process was started to ignore (by nohup, for example) stays ignored.
    if (current.sa_handler == SIG_IGN) {
      continue;
    }
    struct sigaction wanted {};
    wanted.sa_handler = remember;
    wanted.sa_flags = flags;
    ::sigaction(signal, &wanted, nullptr);
  }
}

}  // namespace

void catch_interrupts() { set_handlers(SA_RESTART | static_cast<int>(SA_RESETHAND)); }

void finish_files_when_interrupted() { set_handlers(SA_RESTART); }

int interrupted_by() { return caught; }

void throw_if_interrupted() {
  if (interrupted_by() != 0) {
    throw Cancelled("headway: interrupted");
  }
}

}  // namespace headway::cli
