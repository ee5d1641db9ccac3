# What a run needs: programs, headers, and the Debian packages that supply them. Read by ./dev.

compiler=${CXX:-c++}
jobs=$(nproc 2>/dev/null || echo 2)

has_program() { command -v "$1" >/dev/null; }
has_gpu() { has_program nvidia-smi && nvidia-smi -L >/dev/null 2>&1; }
has_header() {
  printf '#if !__has_include(<%s>)\n#error\n#endif\n' "$1" | "$compiler" -x c++ -E - >/dev/null 2>&1
}
# What Debian's python3 lacks: environments, and the headers of extensions.
has_python() {
  case $1 in
    environments) python3 -c 'import ensurepip, venv' ;;
    headers) [[ -e $(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h ]] ;;
  esac 2>/dev/null
}

# need KIND NAME PACKAGE WHY: the run needs a program, a header or a part of Python, which this Debian package supplies.
needs=()
need() { needs+=("$*"); }

find_missing() {
  missing_packages=()
  missing_reasons=()
  local entry kind name package why
  for entry in "${needs[@]}"; do
    read -r kind name package why <<<"$entry"
    if ! "has_$kind" "$name"; then
      missing_packages+=("$package")
      missing_reasons+=("$package ($why)")
    fi
  done
}

need_compiler() {
  need program "$compiler" g++ "the compiler"
  need program cmake cmake "the build"
}
need_library_parts() {
  need program ninja ninja-build "faster builds than make"
  need program ccache ccache "compiling once what several builds share"
  need header zlib.h zlib1g-dev ".npz files"
  need header nlohmann/json.hpp nlohmann-json3-dev ".safetensors files, and the page that shows attention"
}
need_command() {
  need header CLI/CLI.hpp libcli11-dev "the headway command"
  need header httplib.h libcpp-httplib-dev "the server of the page that shows attention"
  need program pkg-config pkg-config "finding that server's header, and one of the install tests"
}
need_python() {
  need python environments python3-venv "Python packages"
  need python headers python3-dev "the Python extension"
}
need_everything() {
  need_compiler
  need_library_parts
  need_command
  need header gtest/gtest.h libgtest-dev "the tests"
  need program mpirun openmpi-bin "the tests of attention over MPI"
  need program mpicxx libopenmpi-dev "attention over MPI"
}
need_browser() { need program chromium chromium "the tests of the page in a browser"; }

# For the kernels of 64-bit ARM on another machine: a cross compiler and an emulator. GoogleTest is built from its sources.
need_emulation() {
  if [[ $(uname -m) == x86_64 ]]; then
    need program aarch64-linux-gnu-g++ g++-aarch64-linux-gnu "building for 64-bit ARM"
    need program qemu-aarch64 qemu-user "running what was built for 64-bit ARM"
  fi
}
no_emulation() {
  if [[ $(uname -m) != x86_64 ]]; then
    echo "they are the plain tests of a 64-bit ARM machine, and the emulated ones are for x86-64"
  elif ! has_program aarch64-linux-gnu-g++ || ! has_program qemu-aarch64; then
    echo "they need g++-aarch64-linux-gnu and qemu-user, which could not be installed"
  elif [[ ! -e /usr/src/googletest/CMakeLists.txt ]]; then
    echo "they need the sources of GoogleTest in /usr/src/googletest (Debian: libgtest-dev)"
  fi
}

# The command that can install packages, or nothing.
installer() {
  if [[ ${HEADWAY_INSTALL:-} == never ]] || ! has_program apt-get; then
    return
  elif [[ $(id -u) == 0 ]]; then
    echo "apt-get"
  elif has_program sudo && sudo -n true 2>/dev/null; then
    echo "sudo apt-get"
  fi
}

install_packages() {
  local apt=$1
  shift
  export DEBIAN_FRONTEND=noninteractive
  $apt install -y --no-install-recommends "$@" && return
  timeout 180 $apt -o Acquire::Retries=0 -o Acquire::http::Timeout=15 update || true
  # One by one: a package that this system does not have must not prevent the others.
  local package failed=0
  for package in "$@"; do
    $apt install -y --no-install-recommends "$package" || failed=1
  done
  return "$failed"
}

# Installs missing packages if that is permitted. Parts whose packages are still missing are then left out, or are an error if requested.
install_missing() {
  local apt tried=build/could-not-install
  find_missing
  if [[ ${#missing_packages[@]} == 0 ]]; then
    return
  fi
  apt=$(installer)
  # Offline, each further attempt would take long and fail again; ./dev clean deletes the record of the failure.
  if [[ -n $apt && "$(cat "$tried" 2>/dev/null)" != "${missing_packages[*]}" ]]; then
    if step "installing ${missing_packages[*]}" install_packages "$apt" "${missing_packages[@]}" 2>/dev/null; then
      return
    fi
    find_missing
    [[ ${#missing_packages[@]} != 0 ]] || return 0
    mkdir -p build
    echo "${missing_packages[*]}" >"$tried"
  fi
  note "missing: $(printf '%s, ' "${missing_reasons[@]}" | sed 's/, $//')"
  note "to install: sudo apt-get install ${missing_packages[*]}"
}

check_compiler() {
  has_program "$compiler" || fail "There is no C++ compiler: install g++ 12 or later (Debian: sudo apt-get install g++)."
  has_program cmake || fail "There is no CMake: install CMake 3.25 or later (Debian: sudo apt-get install cmake)."
  local version
  version=$(cmake --version | sed -n '1s/[^0-9]*\([0-9.]*\).*/\1/p')
  if [[ $(printf '3.25\n%s\n' "$version" | sort -V | head -n 1) != 3.25 ]]; then
    fail "CMake here is $version: install CMake 3.25 or later."
  fi
}

check_test_parts() {
  has_header gtest/gtest.h ||
    fail "The tests need GoogleTest: install it (Debian: sudo apt-get install libgtest-dev)."
}

find_clang() {
  local name
  for name in clang++ clang++-{21..14}; do
    if has_program "$name"; then
      echo "$name"
      return
    fi
  done
}
has_clang() { [[ -n $(find_clang) ]]; }
has_fuzzer() {
  local clang
  clang=$(find_clang)
  [[ -n $clang ]] && echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
    "$clang" -x c++ -fsanitize=fuzzer,address - -o /dev/null 2>/dev/null
}
