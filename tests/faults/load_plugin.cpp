// Opens the plugin, calls it from a thread that ends, and closes it, many times: the library's threads sleep in its
// code.
#include <dlfcn.h>

#include <cstdio>
#include <thread>

int main(int count, char** arguments) {
  for (int round = 0; round < 50; ++round) {
    void* plugin = count == 2 ? dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL) : nullptr;
    auto* call = plugin == nullptr ? nullptr : reinterpret_cast<int (*)()>(dlsym(plugin, "headway_plugin_call"));
    if (call == nullptr) {
      std::fprintf(stderr, "%s\n", dlerror());
      return 1;
    }
    int threads = 0;
    std::thread([&] { threads = call(); }).join();
    if (threads != 4 || dlclose(plugin) != 0) {
      return 1;
    }
  }
}
