# ./dev test. Read by ./dev.

test_command() {
  local presets="release" all=''
  while (($#)); do
    case $1 in
      --all) presets="release asan tsan" all=yes ;;
      --sanitize)
        case ${2:-} in
          asan | tsan) presets=$2 ;;
          all) presets="asan tsan" ;;
          *) fail "test: --sanitize takes asan, tsan or all, found '${2:-}'" ;;
        esac
        shift
        ;;
      *) fail "test: expected --all or --sanitize, found '$1'" ;;
    esac
    shift
  done
  need_everything
  need_python
  need_browser
  need clang clang++ clang "reading the library's files as clang does"
  if [[ -n $all ]]; then
    need_emulation
  fi
  install_missing
  check_compiler
  share_objects
  check_test_parts
  local preset settings untested=() failed=()
  has_gpu || untested+=("GPU kernels (no GPU here)")
  if lacks_flag avx512vl; then
    untested+=("AVX-512 and AMX kernels (this processor has neither)")
  elif lacks_flag amx_bf16; then
    untested+=("AMX kernels on AMX itself (this processor has none; tests emulate it)")
  fi
  if [[ " $presets " == *" release "* ]]; then
    begin_python "${test_packages[@]}"  # beside the build
  fi
  for preset in $presets; do
    build_settings=()
    settings=()
    if [[ $preset == release ]]; then
      [[ -n $all ]] || settings=(--exclude-regex "$slow_tests")
      read -ra build_settings <<<"$(cuda_settings "$all") $(cpu_settings "$all")"
    fi
    build "$preset" || fail "failed: $preset"
    if [[ $preset == release ]]; then
      begin_beside_tests
    fi
    run_tests "$preset" "${settings[@]}" || fail "failed: $preset"
    if [[ $preset == release ]]; then
      if [[ -n $python ]]; then finish package || fail "failed: the Python package"; fi
      run_python_tests "$all" || failed+=("the Python tests, or they could not run")
      if [[ -n $clang ]]; then finish clang || failed+=("clang"); fi
      [[ ${#failed[@]} == 0 ]] || fail "failed: $(printf '%s; ' "${failed[@]}" | sed 's/; $//')"
    fi
  done
  if [[ -n $all ]]; then
    run_emulated_tests || fail "failed: neon"
  fi
  printf '%severything passed%s (%s) in %d s%s\n' "$bold" "$plain" "${presets// /, }" "$SECONDS" \
    "${untested[*]:+; not tested: $(printf '%s, ' "${untested[@]}" | sed 's/, $//')}"
}

# The sweep over pairs of options has four rounds, each of which has every pair; two of them are left to --all. So are the
# tests on AVX-512 where bf16's own instructions are the best: of AVX-512's kernels these run all but those of bf16, which the
# sweep and the fuzzer run.
slow_tests='/cpu_and_reference_[12]( |$)|^avx512[.]'

# run_tests PRESET [SETTING...]: ctest with these settings.
run_tests() {
  local preset=$1
  shift
  printf '%stesting (%s)%s\n' "$bold" "$preset" "$plain"
  if [[ -t 1 ]]; then
    $(steady_addresses "$preset") ctest --preset "$preset" --parallel "$jobs" "$@" --progress
  else
    $(steady_addresses "$preset") ctest --preset "$preset" --parallel "$jobs" "$@" | short_report "build/$preset"
  fi || return
  slowest_tests "$preset"
}

# Of what ctest says: failures and the closing lines, not a line for each test that starts or passes; how many were skipped.
short_report() {
  awk -v log_file="$1/Testing/Temporary/LastTest.log" '
    /^ +Start +[0-9]+: / || /^ *[0-9]+\/[0-9]+ Test +#[0-9]+: .* Passed +[0-9.]+ sec$/ || /\*\*\*Skipped +[0-9.]+ sec$/ { next }
    /^The following tests did not run:$/ { next }
    /^\t *[0-9]+ - .*\(Skipped\)$/ { ++skipped; next }
    { print }
    END { if (skipped) printf "%d tests were skipped; %s has their reasons\n", skipped, log_file }'
}

# Times of the last run; ctest stores the mean time of each test.
slowest_tests() {
  local costs=build/$1/Testing/Temporary/CTestCostData.txt
  [[ -e $costs ]] || return 0
  note "slowest: $(awk 'NF == 3 { print $3, $1 }' "$costs" | sort -rn | head -n 5 |
    awk '{ printf "%s%s %.0f s", (NR > 1 ? ", " : ""), $2, $1 }')"
}

# Begins what takes the time that tests leave idle by waiting: the Python package, and at an even lower priority the check with
# clang, which goes on beside the Python tests.
begin_beside_tests() {
  clang=$(find_clang)
  find_python "${test_packages[@]}"
  if [[ -n $python ]]; then
    begin package in_idle_time 15 step "building (python), beside the tests" install_python_package
  fi
  if [[ -n $clang ]]; then
    begin clang in_idle_time 19 step "checking with $clang, beside the tests" clang_syntax "$clang"
  else
    untested+=("clang (none here)")
  fi
}
in_idle_time() {
  renice --priority "$1" --pid "$BASHPID" >/dev/null 2>&1 || true
  "${@:2}"
}

# run_python_tests [all]: without "all", tests with the mark slow are left out.
run_python_tests() {
  if [[ -z $python ]]; then
    note "the Python tests need nanobind, scikit-build-core, numpy, pytest and hypothesis, which could not be installed"
    return 1
  fi
  printf '%stesting (python)%s\n' "$bold" "$plain"
  local settings=(--durations 10 --durations-min 5)
  [[ -n ${1:-} ]] || settings+=(-m "not slow")
  "$python" -c 'import xdist' 2>/dev/null && settings+=(-n "$jobs" --dist worksteal)
  # What tests compile with XLA runs once.
  XLA_FLAGS=--xla_backend_optimization_level=0 PYTHONPATH=$PWD/build/python-package "$python" -m pytest "${settings[@]}"
}

# Checks every file of the library with clang, with warnings as errors and without generating code: half a second a file. The
# headers that most files include are compiled once for each set of flags.
clang_syntax() {
  CXX='' cmake --preset clang -G "$(generator clang)" -DCMAKE_CXX_COMPILER="$1" || return
  local commands=build/clang/syntax_commands header=build/clang/common.h flags
  sed -n 's/^ *"command": "\(.*\)",$/\1/p' build/clang/compile_commands.json | sed 's/ -o [^ ]* -c / -fsyntax-only /' >"$commands"
  printf '#include <%s>\n' algorithm cmath functional map optional sstream string vector headway/headway.h >"$header"
  flags=$(sed -n '1s/ -fsyntax-only .*//p' "$commands")
  sh -c "$flags -x c++-header -o $PWD/$header.pch $PWD/$header" || return
  awk -v flags="$flags" -v pch="$PWD/$header.pch" -F ' -fsyntax-only ' \
    '{ print $1 ($1 == flags ? " -include-pch " pch : "") FS $2 }' "$commands" |
    xargs --max-procs "$jobs" --delimiter '\n' --max-args 1 sh -c
}

# On NEON, one round of the CPU engine's sweep over pairs of options.
run_emulated_tests() {
  local reason
  reason=$(no_emulation)
  if [[ -n $reason ]]; then
    untested+=("NEON ($reason)")
    return
  fi
  build neon fuzz_sweep_test || return
  step "testing (neon)" ctest --preset neon --parallel "$jobs" --tests-regex '/cpu_and_reference_0 '
}
