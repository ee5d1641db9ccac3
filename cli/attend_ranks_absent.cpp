// headway attend under mpirun, in a build without MPI: each process would write the same file.
#include <cstdlib>

#include "arguments.h"
#include "attend.h"

namespace headway::cli {

bool started_on_ranks() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    const char* ranks = std::getenv(name);
    if (ranks != nullptr && std::string(ranks) != "1") {
      return true;
    }
  }
  return false;
}

void attend_on_ranks(const AttentionCallArguments&, const OutputFiles&, std::chrono::milliseconds) {
  throw Failure("this process is one of several ranks, and MPI is not built into this command");
}

}  // namespace headway::cli
