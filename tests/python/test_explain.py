"""Plans."""

import numpy as np
import pytest

import headway


def test_flops_count_the_pairs_that_the_key_ranges_leave():
    q, k, v = np.zeros((2, 4, 16, 8)), np.zeros((2, 2, 16, 8)), np.zeros((2, 2, 16, 6))
    for options, pairs in [
        ({}, 2 * 4 * 16 * 16),
        ({"causal": True}, 2 * 4 * 16 * 17 // 2),
        ({"window": (0, 0)}, 2 * 4 * 16),
        ({"valid_lens": [3, 5]}, 4 * 16 * 8),
        ({"query_lens": [3, 5]}, 4 * 16 * 8),
    ]:
        plan = headway.explain(q, k, v, **options)
        assert plan.pairs == pairs and plan.flops == 2 * (8 + 6) * pairs
        assert plan.all_pairs == 2 * 4 * 16 * 16
        backward = headway.explain(q, k, v, **options, backward=True)
        assert backward.operation == "attention_backward" and backward.flops == 5 * (8 + 6) * pairs


def test_a_plan_reads_well():
    x = np.zeros((2, 4, 16, 8), np.float32)
    plan = headway.explain(x, x, x, causal=True, return_lse=True, return_weights=True)
    assert plan.engine in headway.engines() and plan.operation == "attention" and plan.kernel
    assert str(plan).startswith(f"attention on the {plan.engine} engine\n") and "causal top_left" in str(plan)
    assert "lse" in plan.options and "weights" in plan.options
    assert repr(plan).startswith("<Plan: attention on ") and len(repr(plan)) < 120 and "\n" not in repr(plan)
    for name in ("instruction_set", "shape"):
        assert isinstance(getattr(plan, name), str)
    for name in ("query_block", "key_block", "tasks", "threads", "bytes", "scratch_bytes", "flops", "pairs"):
        assert isinstance(getattr(plan, name), int)
    assert all(isinstance(part, str) for passed in plan.passed_over + plan.passed_kernels for part in passed)
    with pytest.raises(AttributeError):
        plan.engine = "cuda"


def test_explain_runs_nothing_and_writes_nothing():
    huge = np.broadcast_to(np.float32(0), (1, 64, 2**20, 128))
    assert headway.explain(huge, huge, huge).flops == 2 * 256 * 64 * 2**40
    x, out = np.ones((3, 4)), np.zeros((3, 4))
    headway.explain(x, x, x, out=out)
    assert not out.any()


def test_gradients_are_a_tuple_with_a_short_repr():
    x = np.ones((3, 4))
    out, lse = headway.attention(x, x, x, return_lse=True)
    gradients = headway.attention_backward(out, x, x, x, out, lse)
    assert isinstance(gradients, headway.Gradients)
    query, key, value, bias, sinks = gradients
    assert query is gradients.query and key.shape == value.shape == (3, 4) and bias is None and sinks is None
    assert "query=float64 (3, 4)" in repr(gradients) and "sinks=None" in repr(gradients)
