"""trace: the same numbers as attention and the layer, and how they are shown."""

import re

import numpy as np
import pytest

import headway
from cases import TOLERANCE, random_case

X = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("seed", range(20))
def test_the_result_is_attention_s(seed, dtype):
    case = random_case(seed, dtype)
    found = headway.trace(*case.inputs, **case.options)
    out, weights = headway.attention(*case.inputs, return_weights=True, **case.options)
    np.testing.assert_allclose(found.result, out.astype(np.float64), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert found.result.dtype == np.float64 and found.result.shape == out.shape
    np.testing.assert_allclose(found["weights"].numbers, weights.astype(np.float64), atol=TOLERANCE[dtype])


def test_the_stages_are_those_of_attention_scores():
    rng = np.random.default_rng(3)
    query, key = rng.standard_normal((2, 4, 5, 8)), rng.standard_normal((2, 2, 6, 8))
    options = dict(softcap=2.0, bias=rng.standard_normal((5, 6)), causal="bottom_right", valid_lens=[6, 4])
    found = headway.trace(query, key, key, **options)
    for stage, name in [("scaled", "scaled scores"), ("capped", "capped scores"), ("biased", "masked scores")]:
        expected = headway.attention_scores(query, key, stage=stage, **options)
        np.testing.assert_allclose(found[name].numbers, expected, atol=1e-14, err_msg=name)


def test_the_document_s_example_from_input_to_output():
    eye = np.eye(4)
    found = headway.trace(X, X, X, layer={"W_q": eye, "W_k": eye, "W_v": eye}, heads=2)
    np.testing.assert_allclose(found.result, headway.multi_head_attention(X, X, X, 2), atol=1e-14)
    assert found.steps[0].name == "input" and found.steps[0].axes == ("token", "in")
    assert [step.name for step in found if step.kind == "given"] == ["input", "W_q", "W_k", "W_v"]
    assert found["scores"].sources == ((7, "row"), (8, "other_row"))
    assert not found.result.flags.writeable


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_gives_its_own_result(bias):
    np.random.seed(0)
    layer = headway.MultiHeadAttention(6, 3, bias=bias)
    queries, keys = np.random.rand(2, 4, 6), np.random.rand(2, 5, 6)
    found = headway.trace(queries, keys, keys, layer=layer, valid_lens=[3, 0])
    np.testing.assert_allclose(found.result, layer.forward(queries, keys, keys, [3, 0]), atol=1e-13)
    assert ("b_o" in [step.name for step in found]) == bias


def test_torch_tensors_are_taken():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = torch.randn(2, 3, 4, dtype=torch.bfloat16)
    np.testing.assert_allclose(headway.trace(x, x, x).result, headway.attention(x, x, x).double().numpy(), atol=0.05)


def test_text_and_notebook_show_every_step_and_keep_tokens_as_text():
    found = headway.trace(X, X, X, heads=2, tokens=["<script>alert(1)</script>", "cat"], title="A & B", causal=True)
    text, shown = str(found), found._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and shown.count("<") == 2
    for step in found:
        assert step.name in text and step.name in shown
    assert repr(found) == "<Trace: 14 steps, result (2, 4)>"
    assert len(found) == 14 and found[0].name == "input" and found[-1] is found.steps[-1]


def test_a_page_is_saved_once_and_replaced_when_asked(tmp_path):
    found = headway.trace(X, X, X, heads=2)
    found.save(tmp_path / "trace.html")
    page = (tmp_path / "trace.html").read_text()
    assert page.startswith("<!doctype html>") and "default-src 'none'" in page
    with pytest.raises(OSError, match="exists"):
        found.save(tmp_path / "trace.html")
    found.save(str(tmp_path / "trace.html"), overwrite=True)
    assert (tmp_path / "trace.html").read_text() != page  # at least its nonce is new
    found.save(tmp_path / "na\udcffme é.html")  # a name that is no text
    assert len(list(tmp_path.iterdir())) == 2


def test_errors_name_what_is_wrong():
    layer = headway.MultiHeadAttention(4, 2)
    long = np.zeros((200, 4))
    for arguments, options, error, text in [
        (
            (long, long, long),
            {},
            ValueError,
            r"trace: scores would have shape \(200, 200\), a step shows at most 16384",
        ),
        ((X, X, X), {"heads": 3}, ValueError, "trace: query has width 4"),
        ((X, X, X), {"layer": layer, "heads": 2}, ValueError, "trace: the layer has 2 heads"),
        ((X, X, X), {"layer": 3}, TypeError, "trace: layer is a int"),
        ((X, X, X), {"layer": {"W_z": np.eye(4)}}, ValueError, "found W_z"),
        ((X, X, X), {"layer": {"W_q": "eye"}}, TypeError, "trace: W_q"),
        ((X, X, X), {"tokens": ["a"]}, ValueError, "trace: key_tokens has 1 entries, expected 2"),
        ((X, X, X), {"tokens": "ab"}, TypeError, "trace: tokens is 'ab'"),
        ((X, X, X), {"causl": True}, TypeError, "causal"),
        ((X, X[:, :3], X), {}, ValueError, "trace: key has head_dim 3"),
        ((X, "key", X), {}, TypeError, "trace: "),
    ]:
        with pytest.raises(error, match=text):
            headway.trace(*arguments, **options)
    with pytest.raises(KeyError, match=re.escape("'soup'; the steps are query, key")):
        headway.trace(X, X[:1], X[:1])["soup"]
