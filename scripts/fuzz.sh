# ./dev fuzz. Read by ./dev.

# All arguments except --sanitize go to the fuzzer, which prints its seed when it starts.
fuzz_command() {
  case ${1:-} in
    --target) fuzz_files "${@:2}" ;;
    *) fuzz_calls "$@" ;;
  esac
}

# Compares calls of every engine and instruction set with the oracle.
fuzz_calls() {
  local preset=release arguments=()
  while (($#)); do
    if [[ $1 == --sanitize ]]; then
      case ${2:-} in
        asan | tsan) preset=$2 ;;
        *) fail "fuzz: --sanitize takes asan or tsan, found '${2:-}'" ;;
      esac
      shift
    else
      arguments+=("$1")
    fi
    shift
  done
  need_compiler
  need_library_parts
  need header gtest/gtest.h libgtest-dev "the oracle's library"
  install_missing
  check_compiler
  share_objects
  check_test_parts
  has_gpu || build_settings=(-DHEADWAY_CUDA=OFF)
  build "$preset" headway_fuzz
  $(steady_addresses "$preset") "build/$preset/tests/fuzz/headway_fuzz" "${arguments[@]}"
}

# fuzz_files NAME|all [--minutes N]. New inputs that cover more code are kept in build/fuzz/corpus, failing inputs in
# build/fuzz/found.
fuzz_files() {
  local names="npy npz safetensors trace view live arguments" minutes=10
  if [[ " $names " == *" ${1:-} "* ]]; then
    names=$1
  elif [[ ${1:-} != all ]]; then
    fail "fuzz: --target takes one of $names, or all; found '${1:-}'"
  fi
  if (($# > 1)); then
    [[ $2 == --minutes && ${3:-} =~ ^[1-9][0-9]{0,5}$ && $# == 3 ]] ||
      fail "fuzz: expected --minutes and a whole number, found '${*:2}'"
    minutes=$3
  fi
  need_everything
  need fuzzer libFuzzer clang "fuzzing"
  need fuzzer libFuzzer libclang-rt-dev "the runtime of fuzzing"
  install_missing
  has_fuzzer libFuzzer || fail "There is no clang with libFuzzer: install it (Debian: sudo apt-get install clang \
libclang-rt-dev)."
  check_compiler
  share_objects
  step "building (fuzz)" build_fuzz_targets || exit
  mkdir -p build/fuzz/found
  local name wrong=()
  for name in $names; do
    mkdir -p "build/fuzz/corpus/$name"
    step "fuzzing $name" run_fuzz_target "$name" $((minutes * 60)) || wrong+=("$name")
  done
  [[ ${#wrong[@]} == 0 ]] || fail "found something: ${wrong[*]}; run its target in build/fuzz/tests/fuzz_targets with \
the file in build/fuzz/found"
}

build_fuzz_targets() {
  CXX='' cmake --preset fuzz -G "$(generator fuzz)" -DCMAKE_CXX_COMPILER="$(find_clang)" &&
    cmake --build --preset fuzz --parallel "$jobs"
}

# An input of a few kilobytes must not take 1 GiB or 20 seconds; a failing file of the corpus is reported too. An allocation of
# more than 512 MiB (the lse of 2^31 rows) fails as it would fail in a system, and the library must report it: libFuzzer's own
# limit would end the program instead.
run_fuzz_target() {
  ASAN_OPTIONS=allocator_may_return_null=1:max_allocation_size_mb=512 "build/fuzz/tests/fuzz_targets/fuzz_$1" -max_total_time="$2" -timeout=20 -rss_limit_mb=1024 -max_len=4096 \
    -print_final_stats=1 -artifact_prefix="$PWD/build/fuzz/found/$1-" "$PWD/build/fuzz/corpus/$1" \
    "$PWD/tests/fuzz_targets/corpus/$1"  # whole paths: a target may change its folder
}
