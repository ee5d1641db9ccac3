"""The package as it is installed: names, signatures, types, the command."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
from functools import partial

import pytest

import headway
from headway import _headway, _needs

CONTRACT = (
    "(query, key, value, *, mask=None, bias=None, causal=False, window=None, valid_lens=None, query_lens=None, "
    "spans=None, scale=None, softcap=None, alibi_slopes=None, sinks=None, dropout=0.0, seed=None, "
    "return_weights=False, return_lse=False, out=None, engine=None, batch_invariant=False, layout='bhsd', span_rows=1)"
)


def test_the_signature_is_the_contract_s():
    assert str(inspect.signature(headway.attention)) == CONTRACT


def test_stubs_have_every_function_and_every_argument():
    folder = pathlib.Path(headway.__file__).parent
    assert (folder / "py.typed").exists()
    stub = (folder / "_headway.pyi").read_text()
    options = re.findall(r"^    (\w+):", stub.split("class Options")[1].split("\n\n")[0], re.MULTILINE)
    functions = [item for item in vars(_headway).values() if inspect.isbuiltin(item)]
    assert len(functions) == 26
    for function in functions:
        texts = re.findall(rf"^def {function.__name__}\((.*?)\) ->", stub, re.MULTILINE | re.DOTALL)
        assert texts, function
        for name in inspect.signature(function).parameters:
            assert name in options or all(re.search(rf"\b{name}:", text) for text in texts), (function, name)
    for name in options:
        assert name in inspect.signature(headway.attention).parameters


def test_the_version_is_the_library_s():
    assert headway.__version__ == importlib.metadata.version("headway")


def installed_script():
    """The `headway` script of this installation: beside the packages (pip --target) or where Python has its scripts."""
    folders = [pathlib.Path(headway.__file__).parents[1] / "bin", pathlib.Path(sysconfig.get_path("scripts"))]
    return next((folder / "headway" for folder in folders if (folder / "headway").exists()), None)


def test_the_command_runs_as_a_script_and_as_a_module():
    script = installed_script()
    assert script, "the package was installed without the headway command: a build with CLI11 has it"
    environment = dict(os.environ, PYTHONPATH=str(pathlib.Path(headway.__file__).parents[1]))
    for command in ([sys.executable, script], [sys.executable, "-m", "headway"]):
        version = subprocess.run([*command, "--version"], env=environment, capture_output=True, text=True)
        assert version.stdout.split() == ["headway", headway.__version__], version.stderr
        wrong = subprocess.run([*command, "attend"], env=environment, capture_output=True, text=True)
        assert wrong.returncode != 0
        assert wrong.stderr


def test_the_extension_and_the_command_load_one_library():
    folder = pathlib.Path(headway.__file__).parent
    (library,) = (folder / "lib").glob("libheadway.so*")
    with open("/proc/self/maps") as maps:
        loaded = {line.split(maxsplit=5)[5].strip() for line in maps if "libheadway" in line}
    assert {pathlib.Path(file) for file in loaded} >= {library}
    listed = subprocess.run(["ldd", folder / "bin" / "headway"], capture_output=True, text=True).stdout
    (line,) = [line for line in listed.splitlines() if "libheadway" in line]
    assert pathlib.Path(line.split("=>")[1].split("(")[0].strip()).resolve() == library.resolve()
    # What the two share is in the library alone.
    assert (folder / "bin" / "headway").stat().st_size < library.stat().st_size
    (extension,) = folder.glob("_headway.*so")
    assert extension.stat().st_size < library.stat().st_size


ENGINES = """
import sys, headway
headway.engines()
with open("/proc/self/maps") as maps:
    print("libheadway_cuda.so" in maps.read())
import numpy as np
x = np.ones((1, 1, 1, 1), np.float32)
print(str(headway.explain(x, x, x)).split("not on")[1].strip())
"""


def test_kernels_for_a_gpu_are_loaded_where_there_is_a_driver(tmp_path):
    """A library called libcuda.so.1 with nothing in it is a driver without a GPU."""
    if not (pathlib.Path(headway.__file__).parent / "lib" / "libheadway_cuda.so").exists():
        pytest.skip("built without the CUDA engine")
    if "cuda" in headway.engines():
        pytest.skip("there is a GPU")
    reason = "cuda: there is no CUDA device, or no driver for one"
    run = partial(subprocess.run, [sys.executable, "-c", ENGINES], capture_output=True, text=True)
    assert run().stdout.splitlines() == ["False", reason]
    compiler = shutil.which("cc") or shutil.which("c++")
    subprocess.run([compiler, "-shared", "-x", "c", "/dev/null", "-o", tmp_path / "libcuda.so.1"], check=True)
    with_driver = run(env=dict(os.environ, LD_LIBRARY_PATH=str(tmp_path)))
    assert with_driver.stdout.splitlines() == ["True", reason], with_driver.stderr


def test_extras_name_the_lowest_versions():
    required = importlib.metadata.requires("headway")
    extras = {extra: text for text in required for extra in re.findall(r'extra == [\'"](\w+)', text)}
    assert set(extras) == {"torch", "transformers", "jax", "flax", "view"}
    assert all(">=" in text for text in required)


def test_the_readme_names_the_lowest_versions():
    readme = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
    required = "\n".join(importlib.metadata.requires("headway"))
    for name, package in {"PyTorch": "torch", "JAX": "jax", "Flax": "flax", "transformers": "transformers"}.items():
        (stated,) = set(re.findall(rf"^{package}>=([\d.]+)", required, re.MULTILINE))
        assert re.search(rf"\b{name} {re.escape(stated)}\b", readme.split("```")[0]), name


def test_the_workflows_test_the_lowest_versions_and_name_files_that_are_there():
    root = pathlib.Path(__file__).parents[2]
    workflows = {path.name: path.read_text() for path in (root / ".github/workflows").glob("*.yml")}
    assert set(workflows) == {"docs.yml", "tests.yml", "wheels.yml"}
    lowest = dict(re.findall(r"(\w+)==([\d.]+)", workflows["tests.yml"].split("frameworks:")[1].split("}")[0]))
    required = "\n".join(importlib.metadata.requires("headway"))
    for package in ("torch", "jax", "flax", "transformers"):
        (stated,) = set(re.findall(rf"^{package}>=([\d.]+)", required, re.MULTILINE))
        assert lowest[package] == f"{stated}.0", package
    for name in re.findall(r"tests/[\w/]+\.\w+|\./dev \w+", "".join(workflows.values())):
        command = name.removeprefix("./dev ")
        assert (root / name).exists() or f"\n  {command}" in (root / "dev").read_text(), name


PROGRAM = """
import pathlib
import numpy as np
import numpy.typing as npt
import headway

x: npt.NDArray[np.float32] = np.ones((2, 3, 4), np.float32)
out: npt.NDArray[np.float32] = headway.attention(x, x, x, causal="top_left", window=(3, None), valid_lens=[1, 2])
out, weights = headway.attention(x, x, x, return_weights=True)
out, weights, lse = headway.attention(x, x, x, return_weights=True, return_lse=True, dropout=0.5, seed=1)
gradients: headway.Gradients = headway.attention_backward(out, x, x, x, out, lse)
scores: npt.NDArray[np.float32] = headway.attention_scores(x, x, stage="biased")
mask: headway.masks.Mask = headway.masks.causal() & (headway.masks.window(3, None) | headway.masks.first([1, 2]))
out = headway.attention(x, x, x, mask=mask)
packed = headway.attention_varlen(x, x, x, [0, 2], np.array([0, 2]))
plan: headway.Plan = headway.explain(x, x, x, softcap=2.0)
flops: int = plan.flops
steps: tuple[headway.TraceStep, ...] = headway.trace(x, x, x, causal=True, tokens=["a", "b", "c"]).steps
layer = headway.MultiHeadAttention(4, 2, bias=True)
layer.forward(x, x, x, None, training=True)
parts: dict[str, object] = layer.backward(x)
found: headway.Analysis = headway.analyze(x, x, top=3, progress=False, causal=True)
page: pathlib.Path = headway.view(x, x, tokens=["a", "b", "c"], path="page.html", scale=2.0)
shown: headway.Page = headway.view(weights=[x], overwrite=True)
server: headway.ViewServer = headway.view(x, x, serve=True, port=8000)
saved: headway.Page = headway.trace(x, x, x).save("trace.html")
steps_found: headway.Trace = headway.trace(x, x, x, layer=layer)
layer.astype(np.float32).save("layer.safetensors", overwrite=True)
again: headway.MultiHeadAttention = headway.MultiHeadAttention.load("layer.safetensors")
joined, shares = again(x, x, x, causal=True, mask=None, return_weights=True)
state: dict[str, object] = headway.convert.to_torch(again)
headway.attention_varlen_backward(x, x, x, x, x, lse, [0, 2], [0, 2])
headway.weights_in(x, x, (0, 1), (0, 2))
headway.mean_weights(x[None], x[None], lse)
headway.plot_heads(found)
headway.plot_row(x, x, 1)
headway.self_attention(*headway.compute_qkv(x[0], x[0], x[0], x[0]))
headway.multi_head_attention(x, x, x, 2)
cache = headway.KVCache(4, 2, kv_heads=3, head_dim=4, rope={"base": 100.0}, window=(8, 0))
number: int = cache.add()
try:
    cache.append(number, x[:1, :, None], x[:1, :, None])
except headway.OutOfPages:
    cache.remove(number)
cache.attend([number], x[:1, :, None], return_lse=True)
headway.attention_paged(x[None], x[None], x[None], [[0]], [1], cu_seqlens_q=None)
turned: npt.NDArray[np.float32] = headway.rope_backward(headway.rope(x, [0, 1, 2]), [0, 1, 2], dims=2)
frequencies, attention_factor = headway.rope_frequencies(4)
headway.set_threads(headway.get_threads())
released: int = headway.release_memory()
names: list[str] = headway.engines()
version: str = headway.__version__
"""


# The same for the modules of frameworks: each as a program of its own, where its framework is installed.
FRAMEWORK_PROGRAMS = {
    "torch": """
import torch
import headway.torch
from headway.torch.tutorial import MultiHeadAttention

x: torch.Tensor = torch.ones(2, 4, 6, 8)
rows, begins = torch.ones(6, 4, 8), torch.tensor([0, 2, 6])
out: torch.Tensor = headway.torch.scaled_dot_product_attention(x, x, x, attn_mask=None, is_causal=True)
out = headway.torch.attention(x, x, x, causal="bottom_right", window=(3, None), softcap=2.0)
out, weights, lse = headway.torch.attention(x, x, x, return_weights=True, return_lse=True)
packed: torch.Tensor = headway.torch.attention_varlen(rows, rows, rows, begins, begins, causal=True)
flash: torch.Tensor = headway.torch.flash_attn_func(x, x, x, causal=True, window_size=(3, -1))
flash = headway.torch.flash_attn_varlen_func(rows, rows, rows, begins, begins, 4, 4)
flash = headway.torch.flash_attn_with_kvcache(x, x, x, cache_seqlens=2, causal=True)
rotated: torch.Tensor = headway.torch.rope(x, torch.arange(6), base=500000.0)
layer = headway.torch.MultiheadAttention(8, 2, batch_first=True)
out, mean = layer(x[0], x[0], x[0], need_weights=True)
pair: tuple[torch.Tensor, torch.Tensor | None] = layer.forward(x[0], x[0], x[0], need_weights=False)
linear: torch.nn.Linear = headway.torch.replace_attention(torch.nn.Linear(3, 3))
module: torch.nn.Module = headway.torch.MultiHeadAttention(d_model=8, num_heads=2)
also: MultiHeadAttention = MultiHeadAttention(8, 2)
model = torch.nn.Transformer(8, 2, 1, 1, 16)
headway.torch.replace_attention(model)
headway.torch.restore_attention(model)
headway.torch.register_with_transformers()
headway.torch.activate()
headway.torch.deactivate()
with headway.torch.record(model) as recording:
    kept: headway.torch.Recording = recording
page = recording.view(path="model.html")
entropies = [analysis.entropy for analysis in recording.analyze()]
""",
    "jax": """
import jax
import jax.numpy as jnp
import headway.jax

x: jax.Array = jnp.ones((2, 6, 4, 8))
out: jax.Array = headway.jax.dot_product_attention(x, x, x, is_causal=True)
own: jax.Array = headway.jax.attention(x, x, x, causal="top_left", window=(3, None))
ring = headway.jax.ring_attention
""",
    "flax": """
import jax
import jax.numpy as jnp
from flax import linen, nnx
import headway.flax
import headway.flax.nnx

x: jax.Array = jnp.ones((2, 6, 16))
layer: linen.Module = headway.flax.MultiHeadDotProductAttention(num_heads=4)
heads: jax.Array = headway.flax.dot_product_attention(x[:, :, None], x[:, :, None], x[:, :, None])
tutorial: linen.Module = headway.flax.MultiHeadAttention(num_hiddens=16, num_heads=4, dropout=0.1)
inner: linen.Module = headway.flax.DotProductAttention(0.1)
other: nnx.Module = headway.flax.nnx.MultiHeadAttention(num_heads=4, in_features=16, decode=False, rngs=nnx.Rngs(0))
heads = headway.flax.nnx.dot_product_attention(x[:, :, None], x[:, :, None], x[:, :, None], is_causal=True)
""",
    "keras": """
import numpy as np
import headway.keras

layer = headway.keras.MultiHeadAttention(num_heads=2, key_dim=4)
out = layer(np.ones((1, 3, 8)), np.ones((1, 3, 8)), use_causal_mask=True)
""",
}
MODULE_PROGRAMS = {
    "masks": """
import numpy as np
import headway.masks

ids = np.array([0, 0, 1])
both: headway.masks.Mask = headway.masks.causal() & headway.masks.window(3, None) & headway.masks.documents(ids)
any_of = headway.masks.first(2) | headway.masks.prefix([1, 2]) | headway.masks.documents(lengths=[2, 1])
sparse = headway.masks.blocks(np.ones((2, 2), np.bool_), (64, 32)) & headway.masks.tree([-1, 0, 0])
arrays = headway.masks.spans(np.zeros((1, 1, 3, 1, 2), np.int32), rows=1) & headway.masks.dense(np.eye(3) > 0)
found = headway.masks.from_bool(np.eye(3, dtype=np.bool_))
taken = headway.masks.from_block_mask(object())
drawn: str = both.draw(3, 3)
""",
    "distributed": """
import numpy as np
import headway.distributed

sharding: headway.distributed.Sharding = headway.distributed.zigzag(8, ranks=2)
other = headway.distributed.contiguous(8, ranks=2) or headway.distributed.balanced(8, ranks=2, causal=True)
plan: headway.distributed.Plan = headway.distributed.explain(sharding, heads=4, causal=True)
cluster: headway.distributed.Cluster | None = None
rows = headway.distributed.take(np.arange(8), sharding.queries[0], axis=0)
whole = headway.distributed.join([rows, rows], sharding.queries, axis=0)
""",
    "torch/distributed": """
import torch
import headway.torch.distributed

x = torch.ones(1, 2, 4, 8)
out = headway.torch.distributed.attention(x, x, x, causal="top_left", timeout=5.0)
layer: torch.nn.Module = headway.torch.distributed.Attention(causal=True)
mine = headway.torch.distributed.take(x, [(0, 2)])
whole = headway.torch.distributed.join([x, x], [[(0, 4)], [(4, 8)]])
try:
    out = layer(x, x, x)
except headway.torch.distributed.LostRank:
    pass
""",
}
CONVERSIONS = """
import headway.convert
import numpy as np

layer: headway.MultiHeadAttention = headway.convert.from_torch({"in_proj_weight": np.eye(4)}, num_heads=2)
layer = headway.convert.from_keras({"query/kernel": np.ones((4, 2, 2))})
layer = headway.convert.from_flax({"params": {}})
headway.convert.to_torch(layer), headway.convert.to_keras(layer), headway.convert.to_flax(layer)
"""
SOURCES = pathlib.Path(__file__).parents[2] / "python"


def typed_programs(folder):
    """Writes the programs whose frameworks are here; returns their names."""
    programs = {"program": PROGRAM, "conversions": CONVERSIONS}
    programs |= {
        f"with_{name.replace('/', '_')}": text
        for name, text in (FRAMEWORK_PROGRAMS | MODULE_PROGRAMS).items()
        if name in ("masks", "distributed") or importlib.util.find_spec(name.split("/")[0]) is not None
    }
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(text)
    return [f"{name}.py" for name in programs]


def test_the_typed_programs_use_every_public_name():
    assert [name for name in headway.__all__ if f"headway.{name}" not in PROGRAM] == []
    for module, program in {
        "convert": CONVERSIONS,
        **FRAMEWORK_PROGRAMS,
        **MODULE_PROGRAMS,
        "flax/nnx": FRAMEWORK_PROGRAMS["flax"],
    }.items():
        source = next(
            path
            for path in (SOURCES / f"headway/{module}.py", SOURCES / f"headway/{module}/__init__.py")
            if path.exists()
        )
        [listed] = re.findall(r"^__all__ = \[(.*?)\]", source.read_text(), re.DOTALL | re.MULTILINE)
        for name in re.findall(r'"(\w+)"', listed):
            assert f"headway.{module.replace('/', '.')}.{name}" in program


def test_typed_programs_and_the_package_itself_pass_pyright(tmp_path):
    pytest.importorskip("basedpyright", reason="basedpyright is not installed")
    settings = {
        "include": [*typed_programs(tmp_path), str(SOURCES / "headway")],
        "extraPaths": [str(SOURCES)],
        "typeCheckingMode": "standard",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--level", "error"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.slow  # pyright reads the same
def test_typed_programs_and_the_package_itself_pass_the_strictest_checks(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache")]
    command += ["--config-file", str(SOURCES.parent / "pyproject.toml")]
    files = [*typed_programs(tmp_path), str(SOURCES / "headway")]
    result = subprocess.run([*command, *files], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    (tmp_path / "wrong.py").write_text(
        "import headway, numpy as np\nheadway.attention(*3 * [np.ones((2, 2))], causl=True)\n"
        "import headway.torch\nheadway.torch.MultiheadAttention(4, 2, batchfirst=True)\n"
    )
    said = subprocess.run([*command, "wrong.py"], cwd=tmp_path, capture_output=True, text=True).stdout
    assert "causl" in said and (importlib.util.find_spec("torch") is None or "batchfirst" in said)


def test_ruff_finds_nothing():
    pytest.importorskip("ruff", reason="ruff is not installed")
    repository = pathlib.Path(__file__).parents[2]
    for arguments in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", str(repository)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


def test_the_frameworks_modules_are_there_when_they_are_used():
    program = """
import sys, headway
assert "torch" not in sys.modules and "jax" not in sys.modules
assert {"torch", "jax", "flax", "keras"} <= set(dir(headway))
for name in ("torch", "jax", "flax", "keras"):
    try:
        __import__(name)
    except ImportError:
        continue
    assert getattr(headway, name).__name__ == f"headway.{name}"
    assert f"headway.{name}" in headway.__doc__
try:
    headway.tensorflow
except AttributeError as error:
    assert str(error) == "module 'headway' has no attribute 'tensorflow'"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_name_that_is_elsewhere_or_misspelt_is_pointed_to():
    for name, place in [
        ("scaled_dot_product_attention", "headway.torch"),
        ("MultiheadAttention", "headway.torch"),
        ("dot_product_attention", "headway.jax and headway.flax"),
    ]:
        with pytest.raises(AttributeError, match=f"^module 'headway' has no attribute '{name}'; it is in {place}$"):
            getattr(headway, name)
    assert not hasattr(headway, "atention")
    run = subprocess.run([sys.executable, "-c", "import headway; headway.atention"], capture_output=True, text=True)
    assert "Did you mean: 'attention'?" in run.stderr


def test_every_name_that_is_pointed_to_is_there():
    for name, place in headway._ELSEWHERE.items():
        for module in place.split(" and "):
            pytest.importorskip(module.removeprefix("headway."))
            assert hasattr(importlib.import_module(module), name)


def test_help_and_attributes_do_without_the_frameworks():
    """In NumPy's company alone: members are listed, and an attribute says what is missing."""
    program = """
import sys
for name in ("torch", "jax", "flax", "keras"):
    sys.modules[name] = None
import inspect, pydoc, headway
assert "attention(" in pydoc.render_doc(headway, renderer=pydoc.plaintext)
assert "attention" in dict(inspect.getmembers(headway)) and not hasattr(headway, "torch")
try:
    headway.torch
except AttributeError as error:
    assert str(error).startswith("headway.torch needs PyTorch 2.5 or later, which cannot be imported here (")
    assert str(error).endswith("): pip install 'torch>=2.5'")
try:
    from headway import torch
except ImportError as error:
    assert str(error).endswith("): pip install 'torch>=2.5'")
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("package", "found", "user", "text"),
    [
        ("torch", "2.4.1+cpu", "headway.torch", "PyTorch 2.5 or later, found 2.4.1+cpu: pip install 'torch>=2.5'"),
        ("jax", "0.5.3", "headway.jax", "JAX 0.6 or later, found 0.5.3: pip install 'jax>=0.6'"),
        ("keras", "2.15.0", "headway.keras", "Keras 3 or later, found 2.15.0: pip install 'keras>=3'"),
        ("flax", "0.9.0", "headway.flax", "Flax 0.10 or later, found 0.9.0: pip install 'flax>=0.10'"),
    ],
)
def test_a_framework_that_is_too_old_is_an_error_with_both_versions(package, found, user, text):
    program = f"""
import sys, types
for name in ("jax", {package!r}):
    sys.modules[name] = types.SimpleNamespace(__version__="9.0")
sys.modules[{package!r}].__version__ = {found!r}
try:
    import {user}
except ImportError as error:
    print(error)
"""
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert printed == f"{user} needs {text}\n"


def test_the_lowest_versions_are_those_of_the_extras():
    required = "\n".join(importlib.metadata.requires("headway"))
    for package, lowest in _needs.LOWEST.items():
        assert set(re.findall(rf"^{package}>=([\d.]+)", required, re.MULTILINE)) == {lowest}
