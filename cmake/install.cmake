# What `cmake --install` puts where: the public headers, the library, the command, and how other builds find them
# (find_package(headway), pkg-config headway).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/headway)
set(pkgconfig_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

install(TARGETS headway EXPORT headwayTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET headway_cuda)
  install(TARGETS headway_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
if(TARGET headway_mpi)
  install(TARGETS headway_mpi EXPORT headwayMpiTargets
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT headwayMpiTargets NAMESPACE headway:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/headway)
endif()
if(TARGET headway_cli)
  install(TARGETS headway_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/headway
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/headway)

# A static library leaves the libraries that it uses to whoever links it; a shared one has settled that itself.
set(config_dependencies "")
set(config_links "")
set(pkgconfig_libs "")
get_target_property(library_type headway TYPE)
if(library_type STREQUAL "STATIC_LIBRARY")
  string(APPEND config_dependencies "find_dependency(Threads)\n")
  string(APPEND pkgconfig_libs " -pthread")
  if(HEADWAY_WITH_CUDA)
    string(APPEND config_dependencies "find_dependency(CUDAToolkit)\n")
    string(APPEND pkgconfig_libs " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt")
  endif()
  if(CMAKE_DL_LIBS)
    string(APPEND pkgconfig_libs " -l${CMAKE_DL_LIBS}")
  endif()
  if(HEADWAY_IO_NPZ)
    string(APPEND config_dependencies "find_dependency(ZLIB)\n")
    string(APPEND config_links "target_link_libraries(headway::headway INTERFACE ZLIB::ZLIB)\n")
    string(APPEND pkgconfig_libs " -lz")
  endif()
endif()

# An installed command finds an installed shared library beside it, wherever the tree was put.
if(TARGET headway_cli AND NOT IS_ABSOLUTE ${CMAKE_INSTALL_LIBDIR})
  file(RELATIVE_PATH bin_to_lib /prefix/${CMAKE_INSTALL_BINDIR} /prefix/${CMAKE_INSTALL_LIBDIR})
  set_property(TARGET headway_cli APPEND PROPERTY INSTALL_RPATH "$ORIGIN/${bin_to_lib}")
endif()

install(EXPORT headwayTargets NAMESPACE headway:: DESTINATION ${package_dir})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/headwayConfig.cmake.in
  ${PROJECT_BINARY_DIR}/headwayConfig.cmake INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
# Before 1.0 a new minor version may change the API.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/headwayConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/headwayConfig.cmake ${PROJECT_BINARY_DIR}/headwayConfigVersion.cmake
  DESTINATION ${package_dir})

# The .pc file finds the prefix from where it lies itself, so that an installed tree can be moved; folders given as
# absolute paths stay what they are.
function(pkgconfig_path result folder)
  if(IS_ABSOLUTE ${folder})
    set(${result} ${folder} PARENT_SCOPE)
  else()
    set(${result} "\${prefix}/${folder}" PARENT_SCOPE)
  endif()
endfunction()
pkgconfig_path(pkgconfig_libdir ${CMAKE_INSTALL_LIBDIR})
pkgconfig_path(pkgconfig_includedir ${CMAKE_INSTALL_INCLUDEDIR})
if(IS_ABSOLUTE ${CMAKE_INSTALL_LIBDIR})
  set(pkgconfig_prefix ${CMAKE_INSTALL_PREFIX})
else()
  file(RELATIVE_PATH up /prefix/${pkgconfig_dir} /prefix)
  string(REGEX REPLACE "/$" "" pkgconfig_prefix "\${pcfiledir}/${up}")
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/headway.pc.in ${PROJECT_BINARY_DIR}/headway.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/headway.pc DESTINATION ${pkgconfig_dir})
