# Configuring and building: presets, generators, and the settings of a test run. Read by ./dev.

on_off() { if "$@"; then echo ON; else echo OFF; fi; }

# The library's files are the same in the C++ build, in the Python package and in the benchmarks: compiled once for all.
share_objects() {
  if has_program ccache; then
    export CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
    export CXX=$compiler  # the same name everywhere: ccache treats c++ and g++ as two compilers
    export CCACHE_DIR=${CCACHE_DIR:-$PWD/build/ccache}
    export CCACHE_BASEDIR=$PWD/build  # what is made in a build folder has the same name in all of them
  fi
}

# Ninja if it is installed, else make. A build folder keeps its generator; it is configured anew if that generator is gone or if the
# folder has been moved.
generator() {
  local cache=build/$1/CMakeCache.txt began_with
  began_with=$(sed -n 's/^CMAKE_GENERATOR:INTERNAL=//p' "$cache" 2>/dev/null || true)
  if [[ -n $began_with ]] && { [[ $began_with == Ninja ]] && ! has_program ninja ||
    ! grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$(pwd -P)" "$cache"; }; then
    rm -rf "build/$1"
    began_with=''
  fi
  if [[ -n $began_with ]]; then
    echo "$began_with"
  elif has_program ninja; then
    echo Ninja
  else
    echo "Unix Makefiles"
  fi
}

# build PRESET [TARGET...], with the settings in build_settings.
build_settings=()
build() { step "building ($1)" configure_and_build "$@"; }

configure_and_build() {
  local preset=$1
  shift
  cmake --preset "$preset" -G "$(generator "$preset")" "${build_settings[@]}" &&
    $(steady_addresses "$preset") cmake --build "build/$preset" --parallel "$jobs" ${1:+--target "$@"}
}

# Settings with which the tests compile the CUDA engine: for the GPU of this machine or, without a GPU but with nvcc, to unoptimised PTX
# only, which finds all errors except those of ptxas in a fraction of the time.
cuda_settings() {
  if has_gpu || ! has_program nvcc; then
    echo -DHEADWAY_CUDA=AUTO
  elif [[ -n ${1:-} ]]; then
    echo -DHEADWAY_CUDA=ON -DHEADWAY_CUDA_CHIPS=90 -DHEADWAY_CUDA_PTX_ONLY=OFF
  else
    echo -DHEADWAY_CUDA=ON -DHEADWAY_CUDA_CHIPS=90 -DHEADWAY_CUDA_PTX_ONLY=ON
  fi
}

# The instruction sets for which the tests compile the CPU engine: files for instruction sets that the processor lacks are only
# checked for errors, by clang_syntax.
cpu_settings() {
  if [[ -n ${1:-} ]]; then
    echo -DHEADWAY_CPU_KERNELS=ALL
  else
    echo -DHEADWAY_CPU_KERNELS=RUNNABLE
  fi
}
lacks_flag() { [[ $(uname -m) == x86_64 ]] && ! grep -qw "$1" /proc/cpuinfo; }

# GCC 12's thread sanitizer does not know every address layout that a newer kernel may choose at random.
steady_addresses() {
  if [[ $1 == tsan ]] && setarch "$(uname -m)" --addr-no-randomize true 2>/dev/null; then
    echo "setarch $(uname -m) --addr-no-randomize"
  fi
}
