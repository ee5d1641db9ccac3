"""ONNX Runtime's MultiHeadAttention operator: f32, forward, on [B, S, heads * width]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
