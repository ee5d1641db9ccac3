# Warnings and sanitizers, as one target that every target of the project links privately.
add_library(headway_compile_options INTERFACE)
# Of CUDA sources nvcc compiles most itself, and what it hands to the host compiler is full of its own code.
target_compile_options(headway_compile_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion>
  # libstdc++ 12's stable_sort calls what C++17 deprecates, and clang from 17 on says so.
  $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wno-deprecated-declarations>
  # g++ collects its garbage from 256 MB on, not from 128: 7 % less time, the same code.
  $<$<COMPILE_LANG_AND_ID:CXX,GNU>:--param=ggc-min-heapsize=262144>
  # The contract forbids changing what the source says about floating point; contraction into FMA is used by name only.
  $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>
  $<$<COMPILE_LANGUAGE:CUDA>:-fmad=false>
  $<$<BOOL:${HEADWAY_WARNINGS_AS_ERRORS}>:$<IF:$<COMPILE_LANGUAGE:CUDA>,-Werror=all-warnings,-Werror>>)
if(HEADWAY_SANITIZE)
  target_compile_options(headway_compile_options INTERFACE -fsanitize=${HEADWAY_SANITIZE} -fno-sanitize-recover=all
                                                           -fno-omit-frame-pointer -g)
  target_link_options(headway_compile_options INTERFACE -fsanitize=${HEADWAY_SANITIZE})
endif()
