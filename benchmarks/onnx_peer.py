"""ONNX Runtime's operators: MultiHeadAttention (f32, forward, on [B, S, heads * width]), and GroupQueryAttention for a
step of decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper


def session(query: Any, key: Any, value: Any, *, causal: bool, threads: int) -> Callable[[], Any]:
    """A call on torch tensors (B, H, S, D); it gives a list of one array (B, Sq, H * D)."""
    batch, heads, queries, head_dim = query.shape
    width = heads * head_dim
    sizes = {"query": [batch, queries, width]}
    sizes["key"] = sizes["value"] = [batch, key.shape[2], width]
    node = helper.make_node(
        "MultiHeadAttention",
        list(sizes),
        ["out"],
        domain="com.microsoft",
        num_heads=heads,
        **({"unidirectional": 1} if causal else {}),
    )
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name, size in sizes.items()],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, sizes["query"])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0" if threads > 1 else "1")
    made = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    joined = [x.transpose(1, 2).reshape(batch, x.shape[2], width).numpy() for x in (query, key, value)]
    feed = dict(zip(sizes, joined))
    return lambda: made.run(None, feed)


def decode_session(
    heads: int, kv_heads: int, keys: int, width: int, *, bits: int, threads: int
) -> Callable[[], Any] | None:
    """One query of one sequence over a cache of `keys` tokens, its own the last: of f32 or, with 8 bits, of int8 with
    one scale for the whole tensor. None where this ONNX Runtime has no such cache."""
    cache_type, cache_kind = (TensorProto.FLOAT, np.float32) if bits == 32 else (TensorProto.INT8, np.int8)
    cache = [1, kv_heads, keys, width]
    types = {
        "query": (TensorProto.FLOAT, [1, 1, heads * width]),
        "key": (TensorProto.FLOAT, [1, 1, kv_heads * width]),
        "value": (TensorProto.FLOAT, [1, 1, kv_heads * width]),
        "past_key": (cache_type, cache),
        "past_value": (cache_type, cache),
        "seqlens_k": (TensorProto.INT32, [1]),
        "total": (TensorProto.INT32, []),
    }
    names, attributes = list(types), {}
    if bits == 8:
        names += ["", "", "", "", "", "k_scale", "v_scale"]
        types["k_scale"] = types["v_scale"] = (TensorProto.FLOAT, [1])
        attributes = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
    node = helper.make_node(
        "GroupQueryAttention",
        names,
        ["out", "present_key", "present_value"],
        domain="com.microsoft",
        num_heads=heads,
        kv_num_heads=kv_heads,
        **attributes,
    )
    outputs = {"out": types["query"], "present_key": types["past_key"], "present_value": types["past_value"]}
    graph = helper.make_graph(
        [node],
        "decode",
        [helper.make_tensor_value_info(name, *type_) for name, type_ in types.items()],
        [helper.make_tensor_value_info(name, *type_) for name, type_ in outputs.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0" if threads > 1 else "1")
    random = np.random.default_rng(0)
    feed = {name: random.standard_normal(types[name][1], dtype=np.float32) for name in ("query", "key", "value")}
    feed["seqlens_k"], feed["total"] = np.array([keys - 1], np.int32), np.array(keys, np.int32)
    if bits == 8:
        feed["k_scale"] = feed["v_scale"] = np.array([0.02], np.float32)
    try:
        made = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        binding = made.io_binding()
        for name, array in feed.items():
            binding.bind_cpu_input(name, array)
        for which in ("key", "value"):  # past and present share a buffer
            drawn = random.standard_normal(cache, dtype=np.float32)
            place = onnxruntime.OrtValue.ortvalue_from_numpy((drawn if bits == 32 else drawn * 40).astype(cache_kind))
            binding.bind_ortvalue_input(f"past_{which}", place)
            binding.bind_ortvalue_output(f"present_{which}", place)
        binding.bind_output("out", "cpu")
        made.run_with_iobinding(binding)
    except Exception as error:  # ONNX Runtime's errors share no class of their own
        if bits == 8:
            return None
        raise RuntimeError("onnxruntime: GroupQueryAttention does not run") from error
    return lambda: made.run_with_iobinding(binding)
