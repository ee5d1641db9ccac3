# ./dev bench. Read by ./dev.

bench_command() {
  local what=${1:-}
  case $what in
    cpu | python | gpu) ;;
    *) fail "bench: expected cpu, python or gpu, found '$what'" ;;
  esac
  shift
  need_compiler
  need_library_parts
  need_python
  if [[ $what == cpu ]]; then
    need header dnnl.h libdnnl-dev "a peer"
    need header cblas.h libopenblas-dev "a peer"
  fi
  install_missing
  check_compiler
  share_objects
  if [[ $what == gpu ]]; then
    has_gpu || fail "bench: there is no NVIDIA GPU here (no nvidia-smi)."
    python=python3
    python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null ||
      fail "bench: python3 needs a PyTorch that sees the GPU, to compare with."
  else
    find_python tests/python/requirements-torch.txt tests/python/requirements-frameworks.txt benchmarks/requirements.txt
    "${python:-false}" -c 'import torch, onnxruntime, jax, transformers' 2>/dev/null ||
      fail "bench: PyTorch, transformers, ONNX Runtime and JAX are needed to compare with; they could not be installed."
    has_gpu || build_settings=(-DHEADWAY_CUDA=OFF)
    step "building (python)" install_python_package
  fi
  case $what in
    cpu) step "building (bench)" build_bench ;;
    gpu) step "building (bench)" build_bench_gpu ;;
  esac
  PYTHONPATH=$PWD/build/python-package "$python" "benchmarks/$what.py" "$@"
}

build_bench() {
  cmake -S . -B build/bench -G "$(generator bench)" -DCMAKE_BUILD_TYPE=Release -DHEADWAY_BUILD_BENCHMARKS=ON \
    -DHEADWAY_WARNINGS_AS_ERRORS=ON \
    -DHEADWAY_BUILD_TESTS=OFF -DHEADWAY_BUILD_CLI=OFF -DHEADWAY_BUILD_EXAMPLES=OFF \
    -DHEADWAY_CUDA="$(on_off has_gpu)" "$@" &&
    cmake --build build/bench --parallel "$jobs"
}

# The same, and the Python package for the python3 that has PyTorch, through which the layer is timed. Without nanobind there,
# the benchmark leaves the layer out and says so.
build_bench_gpu() {
  if ! python3 -c 'import nanobind' 2>/dev/null; then
    build_bench
    return
  fi
  build_bench -DHEADWAY_BUILD_PYTHON=ON -DPython_EXECUTABLE="$(python3 -c 'import sys; print(sys.executable)')" &&
    cmake --install build/bench --component python --prefix build/python-package &&
    cp -R python/headway build/python-package/
}
