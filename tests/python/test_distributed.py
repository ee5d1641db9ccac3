"""headway.distributed: shards, plans and their texts; the calls have tests of their own (test_torch_distributed.py)."""

import doctest

import numpy as np
import pytest

import headway.distributed as distributed


def rows(sharding):
    """Every row of the queries, rank after rank."""
    return [i for shard in sharding.queries for begin, end in shard for i in range(begin, end)]


def test_the_examples_run():
    assert doctest.testmod(distributed).failed == 0
    for name in distributed.__all__:
        assert ">>> " in getattr(distributed, name).__doc__, f"{name} has no example"


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_shards_hold_every_row_once(ranks):
    starts = [0, 10, 11, 90, 103]
    for sharding in (
        distributed.contiguous(103, ranks=ranks),
        distributed.zigzag(103, ranks=ranks),
        distributed.balanced(103, ranks=ranks, causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts),
    ):
        assert sharding.ranks == ranks
        assert sorted(rows(sharding)) == list(range(103))


def test_what_is_taken_apart_is_joined_again():
    whole = np.arange(2 * 24 * 3).reshape(2, 24, 3)
    sharding = distributed.zigzag(24, ranks=3)
    parts = [distributed.take(whole, shard) for shard in sharding.queries]
    assert (distributed.join(parts, sharding.queries) == whole).all()


def test_a_rank_that_sees_nothing_of_the_others_gets_no_bytes():
    bounds = [0, 512, 1024]
    packed = {"causal": True, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    assert distributed.explain(distributed.contiguous(1024, ranks=2), scheme="ring", **packed).bytes == 0


def test_explain_is_of_ranks_that_are_not_there():
    plan = distributed.explain(
        distributed.zigzag(1_000_000, ranks=64),
        heads=32,
        kv_heads=8,
        head_dim=128,
        element_bytes=2,
        causal=True,
        scheme="ring",
        cluster=distributed.Cluster(ranks_per_node=8, flops=4e14, bandwidth=4e11, node_bandwidth=4e11),
    )
    assert plan.imbalance < 0.03
    # 499,999.5 million pairs of 32 heads, 512 FLOPs each, on 64 ranks
    assert plan.seconds * 64 * 4e14 * plan.efficiency == pytest.approx(1e6 * (1e6 + 1) / 2 * 32 * 512)
    assert "ring, 64 ranks" in str(plan)


def test_errors_name_what_was_found():
    sharding = distributed.contiguous(8, ranks=2)
    for call, error, text in (
        (lambda: distributed.contiguous(8), ValueError, "contiguous: ranks is missing"),
        (lambda: distributed.contiguous(8, [4, 4]), TypeError, "found one of each"),
        (lambda: distributed.zigzag(8, ranks=0), ValueError, "expected at least one rank"),
        (lambda: distributed.explain(sharding, scheme="tree"), ValueError, "scheme is 'tree', expected 'automatic'"),
        (lambda: distributed.explain(sharding, element_bytes=3), ValueError, "expected 2, 4 or 8"),
        (lambda: distributed.explain(sharding, scheme="heads"), ValueError, "needs a kv head for each rank"),
        (lambda: distributed.explain(sharding, cluster=(1, 2)), TypeError, "expected a headway.distributed.Cluster"),
        (lambda: distributed.explain(sharding, cluster=distributed.Cluster(flops=0.0)), ValueError, "above 0"),
        (lambda: distributed.balanced(8, ranks=2, cu_seqlens_q=[0, 8]), ValueError, "go together"),
        (lambda: distributed.explain(sharding, causl=True), TypeError, "did you mean"),
    ):
        with pytest.raises(error, match=text):
            call()
