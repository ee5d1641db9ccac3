# headway_precompile(name header...): compiles the headers once for every program that says
# target_precompile_headers(program REUSE_FROM name). CMake builds `name` itself before the first of those, so it is a
# program of one line that links nothing of ours.
function(headway_precompile name)
  set(main ${CMAKE_CURRENT_BINARY_DIR}/${name}.cpp)
  file(CONFIGURE OUTPUT ${main} CONTENT "int main() {}\n")
  add_executable(${name} EXCLUDE_FROM_ALL ${main})
  target_include_directories(${name} PRIVATE $<TARGET_PROPERTY:headway,INTERFACE_INCLUDE_DIRECTORIES>)
  target_link_libraries(${name} PRIVATE headway_compile_options)
  target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1>)
  target_precompile_headers(${name} PRIVATE ${ARGN})
endfunction()

# For folders whose files read a precompiled header: gcc 12 forgets which headers inside of it are the system's, and
# reports what it suspects there (GCC bugs 105329, 105651).
set(HEADWAY_NO_WARNINGS_OF_SYSTEM_HEADERS "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-array-bounds;-Wno-restrict;-Wno-stringop-overflow;-Wno-stringop-overread>")
