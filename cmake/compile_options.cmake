# Warnings and sanitizers, as one target that every target of the project links privately.
add_library(headway_compile_options INTERFACE)
target_compile_options(headway_compile_options INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion
  # The contract forbids changing what the source says about floating point; contraction into FMA is used by name only.
  -ffp-contract=off
  $<$<BOOL:${HEADWAY_WARNINGS_AS_ERRORS}>:-Werror>)
if(HEADWAY_SANITIZE)
  target_compile_options(headway_compile_options INTERFACE -fsanitize=${HEADWAY_SANITIZE} -fno-sanitize-recover=all
                                                           -fno-omit-frame-pointer -g)
  target_link_options(headway_compile_options INTERFACE -fsanitize=${HEADWAY_SANITIZE})
endif()
