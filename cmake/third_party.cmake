# Third-party parts, each the parent project's target where it has one, else the system's, else with HEADWAY_FETCH a
# pinned archive (FETCHCONTENT_SOURCE_DIR_HEADWAY_<NAME> names a folder that has it already). None is installed with
# Headway. What is missing then is in HEADWAY_LACKS, which cmake/summary.cmake prints.
include(FetchContent)
set(HEADWAY_LACKS "")

# headway_fetch(name url hash): unpacks the archive, builds nothing of it, and leaves its folder in `folder`.
function(headway_fetch name url hash)
  FetchContent_Declare(headway_${name} URL ${url} URL_HASH SHA256=${hash} SOURCE_SUBDIR not_built
                       DOWNLOAD_EXTRACT_TIMESTAMP ON)
  FetchContent_MakeAvailable(headway_${name})
  set(folder ${headway_${name}_SOURCE_DIR} PARENT_SCOPE)
endfunction()

# headway_headers(target folder): a target for headers that were fetched.
function(headway_headers target folder)
  string(REPLACE "::" "_" inner fetched_${target})
  add_library(${inner} INTERFACE)
  target_include_directories(${inner} SYSTEM INTERFACE ${folder})
  add_library(${target} ALIAS ${inner})
endfunction()

if(NOT TARGET ZLIB::ZLIB)
  find_package(ZLIB QUIET GLOBAL)
endif()
if(NOT TARGET ZLIB::ZLIB AND HEADWAY_FETCH)
  headway_fetch(zlib https://github.com/madler/zlib/releases/download/v1.3.1/zlib-1.3.1.tar.gz
                9a93b2b7dfdac77ceba5a558a580e74667dd6fede4585b91eefb60f03b72df23)
  enable_language(C)
  add_library(fetched_zlib STATIC)
  foreach(file adler32 compress crc32 deflate inffast inflate inftrees trees uncompr zutil)
    target_sources(fetched_zlib PRIVATE ${folder}/${file}.c)
  endforeach()
  target_include_directories(fetched_zlib SYSTEM PUBLIC ${folder})
  set_target_properties(fetched_zlib PROPERTIES C_VISIBILITY_PRESET hidden)
  add_library(ZLIB::ZLIB ALIAS fetched_zlib)
endif()
if(NOT TARGET ZLIB::ZLIB)
  list(APPEND HEADWAY_LACKS ".npz files and the page that shows attention: zlib (Debian: zlib1g-dev)")
endif()

if(NOT TARGET nlohmann_json::nlohmann_json)
  find_package(nlohmann_json QUIET GLOBAL)
endif()
if(NOT TARGET nlohmann_json::nlohmann_json AND HEADWAY_FETCH)
  headway_fetch(json https://github.com/nlohmann/json/releases/download/v3.11.3/json.tar.xz
                d6c65aca6b1ed68e7a182f4757257b107ae403032760ed6ef121c9d55e81757d)
  headway_headers(nlohmann_json::nlohmann_json ${folder}/single_include)
endif()
if(NOT TARGET nlohmann_json::nlohmann_json)
  list(APPEND HEADWAY_LACKS
       ".safetensors files and the pages that show attention: nlohmann-json (Debian: nlohmann-json3-dev)")
endif()

if(NOT HEADWAY_BUILD_CLI)
  return()
endif()

if(NOT TARGET CLI11::CLI11)
  find_package(CLI11 QUIET)
endif()
if(NOT TARGET CLI11::CLI11 AND HEADWAY_FETCH)
  headway_fetch(cli11 https://github.com/CLIUtils/CLI11/archive/refs/tags/v2.4.2.tar.gz
                f2d893a65c3b1324c50d4e682c0cdc021dd0477ae2c048544f39eed6654b699a)
  headway_headers(CLI11::CLI11 ${folder}/include)
endif()
if(NOT TARGET CLI11::CLI11)
  list(APPEND HEADWAY_LACKS "the headway command: CLI11 (Debian: libcli11-dev)")
endif()

find_package(PkgConfig QUIET)
if(PkgConfig_FOUND)
  pkg_check_modules(HEADWAY_HTTPLIB QUIET IMPORTED_TARGET cpp-httplib)
endif()
if(TARGET PkgConfig::HEADWAY_HTTPLIB)
  add_library(headway_httplib ALIAS PkgConfig::HEADWAY_HTTPLIB)
endif()
if(NOT TARGET headway_httplib AND HEADWAY_FETCH)
  headway_fetch(httplib https://github.com/yhirose/cpp-httplib/archive/refs/tags/v0.18.1.tar.gz
                405abd8170f2a446fc8612ac635d0db5947c0d2e156e32603403a4496255ff00)
  headway_headers(headway_httplib ${folder})
endif()
if(NOT TARGET headway_httplib)
  list(APPEND HEADWAY_LACKS "`headway view --serve`: cpp-httplib (Debian: libcpp-httplib-dev)")
endif()
