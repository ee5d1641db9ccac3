// A plugin that calls the library on several threads.
#include "headway/headway.h"

extern "C" int headway_plugin_call() {
  headway::set_threads(4);
  headway::Tensor q({1, 8, 256, 64}), out({1, 8, 256, 64});
  headway::attention(q, q, q, out);
  return headway::get_threads();
}
