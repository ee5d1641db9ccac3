# The Python environment of tests and benchmarks, and the package built into it. Read by ./dev.

# Modules are compiled when they are imported: most never are.
pip_install() { .venv/bin/python -m pip install --quiet --no-compile --disable-pip-version-check "$@"; }
# All frameworks are installed at once or, if that fails, one file after the other: those that cannot be installed are listed and not tested.
python_packages() {
  local file said files=() package_builders=(scikit-build-core==1.1.1 nanobind==3.1.0 -r tests/python/requirements.txt)
  for file in "$@"; do
    files+=(-r "$file")
  done
  python3 -m venv .venv || return
  rm -f .venv/not-installed
  pip_install "${package_builders[@]}" "${files[@]}" && return
  pip_install "${package_builders[@]}" || return
  for file in "$@"; do
    said=$(pip_install -r "$file" 2>&1) || echo "$file: $(tail -n 1 <<<"$said")" >>.venv/not-installed
  done
}
may_install_python() { [[ ${HEADWAY_INSTALL:-} != never ]]; }

# The interpreter for the Python tests: .venv with the pinned packages if they can be installed, else a python3 that already has the
# packages, else none. Waits for the command that begin_python started.
test_packages=(tests/python/requirements-{torch,frameworks,browser,docs}.txt)
begin_python() { if may_install_python; then begin python python_packages "$@"; fi; }
find_python() {
  python=''
  local install=(python_packages "$@") file
  if [[ -n ${begun[python]:-} ]]; then install=(finish python); fi
  if may_install_python && step "installing Python packages into .venv" "${install[@]}"; then
    python=.venv/bin/python
    if [[ -e .venv/not-installed ]]; then
      while read -r file; do
        note "not installed: $file"
        untested+=("what needs ${file%%:*}")
      done <.venv/not-installed
    fi
  elif python3 -c 'import hypothesis, nanobind, numpy, pytest, scikit_build_core' 2>/dev/null; then
    python=python3
  fi
}

# Installed into a separate folder, so that the tests see what a user would. With the settings of the C++ build the
# library's files are compiled once for both; missing packages are not fetched.
install_python_package() {
  local setting settings=()
  for setting in "${build_settings[@]}" -DHEADWAY_WARNINGS_AS_ERRORS=ON -DHEADWAY_FETCH=OFF; do
    settings+=(--config-settings "cmake.define.${setting#-D}")
  done
  rm -rf build/python-package
  "$python" -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps "${settings[@]}" \
    --target build/python-package .
}
