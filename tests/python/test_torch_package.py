"""headway.torch as a package: examples, types, the first document, what is missing, what is printed."""

import doctest
import inspect
import math
import pathlib
import re
import subprocess
import sys

import pytest

import headway

torch = pytest.importorskip("torch", reason="torch is not installed")

import headway.torch  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", headway.torch.__all__)
def test_docstrings_have_examples_that_run(name):
    if name == "register_with_transformers":
        pytest.importorskip("transformers", reason="transformers is not installed")
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(getattr(headway.torch, name)), {}, name, None, 0)
    assert example.examples, f"{name} has no example"
    output = []
    result = doctest.DocTestRunner(verbose=False).run(example, out=output.append)
    assert result.failed == 0, "".join(output)


def test_the_package_s_own_example():
    result = doctest.testmod(headway.torch)
    assert result.attempted > 0 and result.failed == 0


# ---- Document 001: its listing, with only the import changed ----


def document_001(MultiHeadAttention):
    torch.manual_seed(0)
    mha = MultiHeadAttention(d_model=32, num_heads=4)
    assert type(mha.W_q) is torch.nn.Linear and mha.W_q.weight.shape == (32, 32)
    x = torch.randn(2, 6, 32)
    out = mha.forward(x, x, x)
    Q = torch.randn(1, 3, 32)
    K = torch.randn(1, 7, 32)
    V = torch.randn(1, 7, 32)
    return mha, out, mha.forward(Q, K, V)


class FromTheDocument(torch.nn.Module):
    """What the document's steps say, in plain torch."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (torch.nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, Q, K, V):
        q, k, v = (
            linear(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear, x in ((self.W_q, Q), (self.W_k, K), (self.W_v, V))
        )
        weights = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1)
        return self.W_o((weights @ v).transpose(1, 2).flatten(2))


def test_document_001():
    ours, theirs = document_001(headway.torch.MultiHeadAttention), document_001(FromTheDocument)
    for one, other in zip(ours[1:], theirs[1:]):
        torch.testing.assert_close(one, other)
    assert ours[1].shape == (2, 6, 32) and ours[2].shape == (1, 3, 32)
    assert list(ours[0].state_dict()) == [f"W_{part}.{kind}" for part in "qkvo" for kind in ("weight", "bias")]
    for mha, out, cross in (ours, theirs):
        (out.square().sum() + cross.square().sum()).backward()
        assert mha.double()(*3 * [torch.ones(1, 2, 32).double()]).dtype == torch.float64
    for (name, one), other in zip(ours[0].named_parameters(), theirs[0].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4, msg=name)  # of float32
    optimizer = torch.optim.SGD(ours[0].parameters(), lr=0.1)
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (ours[0](x, x, x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    with pytest.raises(
        ValueError, match=r"MultiHeadAttention: K has shape \(1, 7, 31\), expected \(batch, length, 32\)"
    ):
        ours[0](x, torch.ones(1, 7, 31), x)


# ---- What is printed, what is missing ----


FORKED = """
import os, sys
import torch, headway, headway.torch
headway.set_threads(3)
torch.set_num_threads(3)
x = torch.randn(1, 8, 300, 64)
expected = headway.torch.scaled_dot_product_attention(x, x, x).numpy().tobytes()
(x @ x.transpose(-2, -1)).sum().item()  # torch's own threads are up
child = os.fork()
if child == 0:
    # Torch's own operators would wait for its threads for ever.
    out = headway.torch.scaled_dot_product_attention(x, x, x)
    os._exit(0 if out.numpy().tobytes() == expected else 1)
status = os.waitpid(child, 0)[1]
torch.set_num_threads(1)
assert headway.torch.scaled_dot_product_attention(x, x, x).numpy().tobytes() == expected
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_calls_on_torch_s_threads_survive_a_fork_and_any_number_of_them():
    assert headway._headway.share_openmp_threads(torch.__path__[0] + "/lib/libtorch_cpu.so")
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, timeout=60)


def test_importing_it_imports_no_compiler():
    """Which takes longer than all of torch."""
    program = "import sys, torch; before = {*sys.modules}; import headway.torch; print(*({*sys.modules} - before))"
    printed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True
    )
    imported = {name.partition(".")[0] for name in printed.stdout.split()}
    assert imported.isdisjoint({"sympy", "transformers", "matplotlib", "jax"})
    assert "torch._dynamo" not in printed.stdout.split() and "headway.torch.sdpa" in printed.stdout.split()


def test_short_readable_reprs():
    assert repr(headway.torch.MultiHeadAttention(8, 2)).splitlines()[:2] == [
        "MultiHeadAttention(",
        "  d_model=8, num_heads=2",
    ]
    layer = headway.torch.MultiheadAttention(8, 2, kdim=3, vdim=4, bias=False, add_bias_kv=True, add_zero_attn=True)
    assert "embed_dim=8, num_heads=2, kdim=3, vdim=4, bias=False, add_bias_kv=True, add_zero_attn=True" in repr(layer)


@pytest.mark.parametrize(
    "package, call, install",
    [
        ("torch", "pass", "pip install 'torch>=2.5'"),
        ("transformers", "headway.torch.register_with_transformers()", "pip install transformers"),
    ],
)
def test_what_is_not_installed_is_named(package, call, install):
    program = f"import sys; sys.modules[{package!r}] = None\nimport headway.torch\n{call}"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1 and install in result.stderr.splitlines()[-1], result.stderr
    plain = subprocess.run([sys.executable, "-c", "import headway, sys; assert 'torch' not in sys.modules"])
    assert plain.returncode == 0


@pytest.mark.parametrize("name", ["torch_quickstart", "torch_transformers"])
def test_examples_run(name):
    if name == "torch_transformers":
        pytest.importorskip("transformers", reason="transformers is not installed")
    path = ROOT / "examples" / "python" / f"{name}.py"
    result = subprocess.run([sys.executable, path], capture_output=True, text=True)
    assert result.returncode == 0 and "False" not in result.stdout.replace("NaN: False", ""), (
        result.stdout + result.stderr
    )


def snippets():
    """The Python of the migration guide: each block a program of its own."""
    guides = [path for path in sorted((ROOT / "docs").glob("migrate*.md")) if "headway.torch" in path.read_text()]
    texts = [block for path in guides for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)]
    return [text for text in texts if "headway.torch" in text]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("index", range(len(snippets())))
def test_the_guide_s_snippets_run(index):
    text = snippets()[index]
    if "transformers" in text:
        pytest.importorskip("transformers", reason="transformers is not installed")
    exec(compile(text, f"snippet {index} of docs/migrate", "exec"), {})


def test_the_guide_has_snippets():
    assert len(snippets()) >= 6
