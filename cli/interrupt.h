// SIGINT (Ctrl-C), SIGTERM and SIGHUP as a request to stop, which the work polls.
#pragma once

namespace headway::cli {

void catch_interrupts();

// The signal that asked to stop, 0 when none has.
int interrupted_by();

void throw_if_interrupted();  // Cancelled

// A second signal normally ends the process at once, for work that does not poll. Once files are being written it no
// longer does: a file is completed or removed first.
void finish_files_when_interrupted();

}  // namespace headway::cli
