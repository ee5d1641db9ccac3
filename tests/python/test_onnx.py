"""The test vectors of Attention and FlexAttention that the onnx package carries, through headway's functions."""

import pathlib

import numpy as np
import pytest

import headway

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
loader = pytest.importorskip("onnx.backend.test.loader")
pytest.importorskip("onnx.reference")

STAGES = ("scaled", "capped", "biased", "weights")  # of qk_matmul_output_mode 0 to 3
INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")


def vectors():
    """Every test whose model is one Attention node: by name, the node and the test."""
    found = {}
    for test in loader.load_model_tests(kind="node"):
        if "attention" in test.name:
            nodes = onnx.load(pathlib.Path(test.model_dir, "model.onnx")).graph.node
            if [node.op_type for node in nodes] == ["Attention"]:
                found[test.name] = (nodes[0], test)
    return dict(sorted(found.items()))


VECTORS = vectors()


def read(test, kind, names):
    """The stored arrays of the inputs or outputs that the node has."""
    arrays = {}
    for number, name in enumerate(name for name in names if name):
        tensor = onnx.TensorProto()
        tensor.ParseFromString(pathlib.Path(test.model_dir, "test_data_set_0", f"{kind}_{number}.pb").read_bytes())
        arrays[name] = onnx.numpy_helper.to_array(tensor)
    return arrays


def split(array, heads):
    """(B, S, heads * d) -> (B, heads, S, d)."""
    return array if array.ndim == 4 else array.reshape(*array.shape[:2], heads, -1).swapaxes(1, 2)


def causal_from(past, queries, keys, batch):
    """Options for j <= i + past: headway counts from the keys' end, and `valid_lens` says where that is."""
    if past + queries <= keys:
        return {"causal": "bottom_right", "valid_lens": [past + queries] * batch}
    return {"window": (None, past + queries - keys)}


def attention(
    Q,
    K,
    V,
    attn_mask=None,
    past_key=None,
    past_value=None,
    nonpad_kv_seqlen=None,
    *,
    is_causal=0,
    q_num_heads=None,
    kv_num_heads=None,
    scale=None,
    softcap=0.0,
    qk_matmul_output_mode=0,
):
    """The operator, in headway's calls."""
    query, key, value = split(Q, q_num_heads), split(K, kv_num_heads), split(V, kv_num_heads)
    past = 0 if past_key is None else past_key.shape[2]
    if past_key is not None:
        key, value = np.concatenate([past_key, key], 2), np.concatenate([past_value, value], 2)
    batch, _, queries, _ = query.shape
    keys = key.shape[2]
    options = {"scale": scale, "softcap": softcap or None}
    if is_causal:
        assert nonpad_kv_seqlen is None
        options |= causal_from(past, queries, keys, batch)
    if nonpad_kv_seqlen is not None:
        options["valid_lens"] = nonpad_kv_seqlen
    if attn_mask is not None:
        boolean = attn_mask.dtype == bool
        widths = [(0, 0)] * (attn_mask.ndim - 1) + [(0, keys - attn_mask.shape[-1])]
        padded = np.pad(attn_mask, widths, constant_values=False if boolean else -np.inf)
        options["mask" if boolean else "bias"] = padded
    out = headway.attention(query, key, value, **options)
    if Q.ndim == 3:
        out = out.swapaxes(1, 2).reshape(batch, queries, -1)
    scores = headway.attention_scores(query, key, stage=STAGES[qk_matmul_output_mode], **options)
    return dict(zip(OUTPUTS, (out, key, value, scores)))


def test_there_are_64_vectors_and_each_runs_below():
    assert len(VECTORS) == 64


@pytest.mark.parametrize("name", VECTORS)
def test_vector(name):
    node, test = VECTORS[name]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    inputs = read(test, "input", node.input)
    arrays = {place: inputs[name] for place, name in zip(INPUTS, node.input) if name}
    found = attention(**arrays, **attributes)
    outputs = read(test, "output", node.output)
    assert outputs
    for place, name in zip(OUTPUTS, node.output):
        if name:
            expected = outputs[name]
            assert found[place].dtype == expected.dtype and found[place].shape == expected.shape
            half = expected.dtype == np.float16
            np.testing.assert_allclose(found[place], expected, rtol=test.rtol, atol=2e-3 if half else 1e-6)


# ---- FlexAttention: what its score_mod adds to each score is a bias ----


def flex_vectors():
    """Every test of one FlexAttention node, but for those that change weights after the softmax."""
    found = {}
    for test in loader.load_model_tests(kind="node"):
        if test.name.startswith("test_flexattention") and not test.name.endswith("_expanded"):
            model = onnx.load(pathlib.Path(test.model_dir, "model.onnx"))
            node = model.graph.node[0]
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            if node.op_type == "FlexAttention" and "prob_mod" not in attributes:
                found[test.name] = (model, attributes, test)
    return dict(sorted(found.items()))


FLEX_VECTORS = flex_vectors()


def test_there_are_10_flex_vectors_and_each_runs_below():
    assert len(FLEX_VECTORS) == 10


@pytest.mark.parametrize("name", FLEX_VECTORS)
def test_flex_vector(name):
    model, attributes, test = FLEX_VECTORS[name]
    node = model.graph.node[0]
    query, key, value = read(test, "input", node.input).values()
    options = {"scale": attributes.get("scale")}
    if "score_mod" in attributes:
        graph, versions = attributes["score_mod"], {one.domain: one.version for one in model.opset_import}
        scores = headway.attention_scores(query, key, stage="scaled", **options)
        modified = onnx.reference.ReferenceEvaluator(graph, opsets=versions).run(None, {graph.input[0].name: scores})
        options["bias"] = modified[0] - scores
    found, (expected,) = headway.attention(query, key, value, **options), read(test, "output", node.output).values()
    assert found.dtype == expected.dtype
    half = expected.dtype == np.float16
    np.testing.assert_allclose(found, expected, rtol=test.rtol, atol=2e-3 if half else 1e-6)
