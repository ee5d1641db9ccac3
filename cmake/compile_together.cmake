# headway_compile_together(target group file...): compiles host files as one, so that what they include is parsed once: in
# their anonymous namespaces a name has one meaning. By its place in the build folder, ccache takes that one for the same
# file in every build; CMake's own UNITY_BUILD, which tests and the Python module use, differs in that.
function(headway_compile_together target group)
  if(NOT HEADWAY_UNITY_BUILD OR NOT ARGN)
    return()
  endif()
  set_source_files_properties(${ARGN} TARGET_DIRECTORY ${target} PROPERTIES HEADER_FILE_ONLY ON)
  list(TRANSFORM ARGN REPLACE ".+" "#include \"\\0\"\n" OUTPUT_VARIABLE includes)
  string(CONCAT includes ${includes})
  set(together ${CMAKE_BINARY_DIR}/headway_unity/${group}.cpp)
  file(CONFIGURE OUTPUT ${together} CONTENT "// Made by cmake/compile_together.cmake.\n${includes}" @ONLY)
  target_sources(${target} PRIVATE ${together})
  if(HEADWAY_CPU_KERNELS STREQUAL "NATIVE" AND CMAKE_BUILD_TYPE STREQUAL "Release")
    set_source_files_properties(${together} TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS -O1)  # a build that is to be over soon
  endif()
endfunction()
