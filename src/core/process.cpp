#include "core/process.h"

#include <dirent.h>
#include <dlfcn.h>

#include <cstdlib>

namespace headway {

cpu_set_t process_cpus() noexcept {
  cpu_set_t all;
  CPU_ZERO(&all);
  const auto add = [&](pid_t thread) {
    cpu_set_t cpus;
    if (sched_getaffinity(thread, sizeof cpus, &cpus) == 0) {
      CPU_OR(&all, &all, &cpus);
    }
  };
  add(0);
  if (DIR* threads = opendir("/proc/self/task"); threads != nullptr) {
    while (const dirent* entry = readdir(threads)) {
      if (const int thread = std::atoi(entry->d_name); thread > 0) {
        add(thread);
      }
    }
    closedir(threads);
  }
  return all;
}

void stay_loaded() noexcept {
  Dl_info library;
  if (dladdr(reinterpret_cast<void*>(&stay_loaded), &library) != 0) {
    dlopen(library.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
  }
}

}  // namespace headway
