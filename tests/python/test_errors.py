"""Refused calls: the class, the operation that the text starts with, and what it names."""

import numpy as np
import pytest

import headway

Q, K, V = np.zeros((2, 6, 5, 8), "f"), np.zeros((2, 3, 7, 8), "f"), np.zeros((2, 3, 7, 4), "f")

REFUSED = [
    # Options: values
    (ValueError, "scale is nan", {"scale": np.nan}),
    (ValueError, "scale is inf", {"scale": np.inf}),
    (ValueError, "scale is", {"scale": 10**400}),
    (TypeError, "scale is '1', expected a number", {"scale": "1"}),
    (TypeError, "scale is a list, expected a number", {"scale": [1, 2]}),
    (TypeError, "scale is a complex", {"scale": 1j}),
    (ValueError, "softcap is 0, expected a finite number above 0", {"softcap": 0}),
    (ValueError, "softcap is -2.5", {"softcap": -2.5}),
    (ValueError, "softcap is nan", {"softcap": float("nan")}),
    (ValueError, "dropout is 1.5, expected 0 to 1", {"dropout": 1.5, "seed": 1}),
    (ValueError, "dropout is -0.25", {"dropout": -0.25, "seed": 1}),
    (ValueError, "dropout 0.5 needs a seed", {"dropout": 0.5}),
    (ValueError, "seed is -1, expected 0 to 2", {"seed": -1}),
    (ValueError, "seed is 18446744073709551616", {"seed": 2**64}),
    (TypeError, "seed is 1.0, expected an integer", {"seed": 1.0}),
    (TypeError, "seed is 'a'", {"seed": "a"}),
    # Options: words
    (ValueError, "causal is ambiguous with 5 queries and 7 keys: choose top_left or bottom_right", {"causal": True}),
    (ValueError, "causal is 'bottom', expected False, True, 'top_left' or 'bottom_right'", {"causal": "bottom"}),
    (TypeError, "causal is 1, expected", {"causal": 1}),
    (TypeError, "causal is array", {"causal": np.ones((5, 7), bool)}),
    (ValueError, "engine is 'gpu', expected 'reference', 'cpu', 'cuda' or None", {"engine": "gpu"}),
    (TypeError, "engine is 3", {"engine": 3}),
    # Options: the window
    (ValueError, "window left is -1, expected 0 or more, or None for unlimited", {"window": (-1, 0)}),
    (ValueError, "window right is -7, expected 0 or more, or None", {"window": (None, -7)}),
    (ValueError, "window left is -1000000000000000000000000000000", {"window": (-(10**30), 0)}),
    (TypeError, "window left is 1.5, expected an integer or None", {"window": (1.5, 0)}),
    (ValueError, r"window is \(1, 2, 3\), expected a pair", {"window": (1, 2, 3)}),
    (TypeError, "window is 128, expected a pair", {"window": 128}),
    (TypeError, "window is 'ab', expected a pair", {"window": "ab"}),
    # Options: lengths
    (ValueError, r"valid_lens\[1\] is 8, expected 0 to 7", {"valid_lens": [7, 8]}),
    (ValueError, r"valid_lens\[0\] is -3", {"valid_lens": np.array([-3, 1], np.int8)}),
    (ValueError, r"valid_lens\[1, 4\] is 99", {"valid_lens": np.array([[1] * 5, [1] * 4 + [99]], np.uint8)}),
    (
        ValueError,
        r"valid_lens\[0\] is 18446744073709551615, expected a number below 2\^63",
        {"valid_lens": np.array([2**64 - 1, 0], np.uint64)},
    ),
    (
        ValueError,
        r"valid_lens is \[1180591620717411303424, 0\], expected numbers below 2\^63",
        {"valid_lens": [2**70, 0]},
    ),
    (ValueError, r"valid_lens has shape \(3,?\)", {"valid_lens": [1, 2, 3]}),
    (ValueError, r"valid_lens has shape \(\)", {"valid_lens": 3}),
    (TypeError, "valid_lens has type f64", {"valid_lens": [1.0, 2.0]}),
    (TypeError, "valid_lens has type bool", {"valid_lens": [True, False]}),
    (TypeError, "valid_lens has type complex128, expected integers", {"valid_lens": [1j, 2]}),
    (TypeError, "valid_lens has type <U1, expected integers", {"valid_lens": ["1", "2"]}),
    (
        TypeError,
        r"valid_lens has type >i8 \(not this machine's byte order\), expected integers",
        {"valid_lens": np.array([1, 2], ">i8")},
    ),
    (TypeError, r"bias has type >f4 \(not this machine's byte order\), expected", {"bias": np.ones((5, 7), ">f4")}),
    (TypeError, "valid_lens is .*None.*, expected integers", {"valid_lens": [None, 1]}),
    (ValueError, r"valid_lens is \[\[1\], \[1, 2\]\], expected rows of equal length", {"valid_lens": [[1], [1, 2]]}),
    (ValueError, r"mask is \[\[True\], \[True, False\]\], expected rows", {"mask": [[True], [True, False]]}),
    (ValueError, r"sinks is \[\[1.0\], \[1.0, 2.0\]\], expected rows", {"sinks": [[1.0], [1.0, 2.0]]}),
    (ValueError, r"query_lens\[1\] is 6, expected 0 to 5", {"query_lens": [5, 6]}),
    (ValueError, "query_lens has shape", {"query_lens": [[1, 2]]}),
    # Options: arrays
    (TypeError, "mask has type i64, expected bool .*bias", {"mask": np.ones((5, 7), np.int64)}),
    (TypeError, "mask has type uint8, expected bool .*bias", {"mask": np.ones((5, 7), np.uint8)}),
    (TypeError, "mask has type f32, expected bool", {"mask": np.ones((5, 7), np.float32)}),
    (TypeError, "mask has type i64", {"mask": [[0, 1]]}),
    (
        ValueError,
        r"mask has shape \(5, 6\), which does not broadcast to \(2, 6, 5, 7\)",
        {"mask": np.ones((5, 6), bool)},
    ),
    (
        ValueError,
        r"mask has shape \(2, 7\), .* which keys .*, make it \(2, 1, 1, 7\)$",
        {"mask": np.ones((2, 7), bool)},
    ),
    (ValueError, r"bias has shape \(2, 5, 7\), .*, make it \(2, 1, 5, 7\)$", {"bias": np.ones((2, 5, 7))}),
    (TypeError, "bias has type i64", {"bias": np.ones((5, 7), np.int64)}),
    (TypeError, "bias has type bool", {"bias": np.ones((5, 7), bool)}),
    (TypeError, "bias has type complex64", {"bias": np.ones((5, 7), np.complex64)}),
    (ValueError, r"bias has shape \(2, 6, 5, 6\)", {"bias": np.ones((2, 6, 5, 6))}),
    (ValueError, r"bias has 9 axes", {"bias": np.ones((1,) * 9)}),
    (ValueError, r"alibi_slopes has shape \(3,?\), expected \(6,?\)", {"alibi_slopes": [1.0, 2.0, 3.0]}),
    (TypeError, "alibi_slopes has type i32", {"alibi_slopes": np.zeros(6, np.int32)}),
    (ValueError, r"sinks has shape \(1, 6\)", {"sinks": np.zeros((1, 6))}),
    (TypeError, "sinks has type object", {"sinks": np.array([None] * 6)}),
    # out
    (ValueError, r"out has shape \(2, 6, 5, 8\), expected \(2, 6, 5, 4\)", {"out": np.zeros((2, 6, 5, 8), "f")}),
    (TypeError, "out has type f64, query has f32", {"out": np.zeros((2, 6, 5, 4))}),
    (TypeError, "out has type i32", {"out": np.zeros((2, 6, 5, 4), np.int32)}),
    (TypeError, "out must be an array", {"out": [0.0]}),
    (
        ValueError,
        "out has strides .* two of its elements share memory",
        {"out": np.lib.stride_tricks.as_strided(np.zeros(4, "f"), (2, 6, 5, 4), (0, 0, 0, 4), writeable=True)},
    ),
]


@pytest.mark.parametrize("error, text, options", REFUSED)
def test_options_that_cannot_be_are_named(error, text, options):
    with pytest.raises(error, match="^attention: " + text):
        headway.attention(Q, K, V, **options)


INPUTS = [
    (ValueError, "key has head_dim 9, query has 8", (Q, np.zeros((2, 3, 7, 9), "f"), V)),
    (ValueError, "key has batch 3, query has 2", (Q, np.zeros((3, 3, 7, 8), "f"), V)),
    (ValueError, "value has length 9, key has 7", (Q, K, np.zeros((2, 3, 9, 4), "f"))),
    (ValueError, "value has 2 heads, key has 3", (Q, K, np.zeros((2, 2, 7, 4), "f"))),
    (
        ValueError,
        "query has 6 heads, expected a multiple of the 4",
        (Q, np.zeros((2, 4, 7, 8), "f"), np.zeros((2, 4, 7, 4), "f")),
    ),
    (ValueError, "key has shape", (Q, K[0], V)),
    (ValueError, "query must have 4 axes", (Q[0, 0, 0], K[0, 0, 0], V[0, 0, 0])),
    (ValueError, "query must have 4 axes", 3 * (np.ones((), "f"),)),
    (ValueError, "query must have 4 axes", (Q[None], K[None], V[None])),
    (ValueError, "query has 9 axes", (np.zeros((1,) * 9, "f"), K, V)),
    (TypeError, "key has type f64, query has f32", (Q, K.astype("d"), V)),
    (TypeError, "value has type f16, query has f32", (Q, K, V.astype(np.float16))),
    (TypeError, "query has type i64", (Q.astype(int), K.astype(int), V.astype(int))),
    (TypeError, "query has type bool", (Q.astype(bool), K, V)),
    (TypeError, "query has type uint8", (Q.astype(np.uint8), K, V)),
    (TypeError, "key has type complex64, expected f32, f64, bf16 or f16", (Q, K.astype(np.complex64), V)),
    (TypeError, "query has type >f4", (Q.astype(">f4"), K, V)),
    (TypeError, "query has type object", (Q.astype(object), K, V)),
    (TypeError, "query has type <U3", (np.full(Q.shape, "abc"), K, V)),
    (TypeError, "query has type (float128|longdouble)", (Q.astype(np.longdouble), K, V)),
    (TypeError, "query has type datetime64", (Q.astype("M8[s]"), K, V)),
    (TypeError, r"query must be an array .*, found list: convert it with numpy.asarray$", (Q.tolist(), K, V)),
    (TypeError, r"query must be an array .*, found float$", (1.0, K, V)),
    (TypeError, r"query has type \[\('x', '<f4'\)\]", (np.zeros(Q.shape, [("x", "f4")]), K, V)),
]


@pytest.mark.parametrize("error, text, inputs", INPUTS)
def test_inputs_that_do_not_fit_are_named(error, text, inputs):
    with pytest.raises(error, match="^attention: " + text):
        headway.attention(*inputs)


def test_every_function_names_itself():
    bad = np.zeros((2, 3, 7, 9), "f")
    out, lse = headway.attention(Q, K, V, return_lse=True)
    rows = Q[0].swapaxes(0, 1)
    calls = {
        "attention_scores": lambda: headway.attention_scores(Q, bad),
        "explain": lambda: headway.explain(Q, bad, V),
        "attention_backward": lambda: headway.attention_backward(out, Q, bad, V, out, lse),
        "attention_varlen": lambda: headway.attention_varlen(rows, rows[..., :4], rows, [0, 5], [0, 5]),
        "attention_varlen_backward": lambda: headway.attention_varlen_backward(
            rows, rows, rows[..., :4], rows, rows, np.zeros((6, 5), "f"), [0, 5], [0, 5]
        ),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"^{name}: key has head_dim"):
            call()


def test_backward_checks_what_forward_gave():
    out, lse = headway.attention(Q, K, V, return_lse=True)
    with pytest.raises(ValueError, match=r"attention_backward: grad_out has shape \(2, 6, 5, 3\)"):
        headway.attention_backward(out[..., :3], Q, K, V, out, lse)
    with pytest.raises(TypeError, match="attention_backward: lse has type f64, expected f32"):
        headway.attention_backward(out, Q, K, V, out, lse.astype("d"))
    with pytest.raises(ValueError, match="attention_backward: lse has shape"):
        headway.attention_backward(out, Q, K, V, out, lse[:1])
    with pytest.raises(TypeError, match="attention_backward: out has type i32"):
        headway.attention_backward(out, Q, K, V, out.astype(np.int32), lse)


def test_stages_and_keywords():
    with pytest.raises(ValueError, match="attention_scores: stage is 'soft', expected 'scaled'"):
        headway.attention_scores(Q, K, stage="soft")
    with pytest.raises(TypeError, match="attention_scores: stage is 1"):
        headway.attention_scores(Q, K, stage=1)
    for wrong, right in [
        ("is_causal", "causal"),
        ("attn_mask", "mask"),
        ("dropout_p", "dropout"),
        ("softmax_scale", "scale"),
        ("window_size", "window"),
        ("valid_len", "valid_lens"),
        ("return_weight", "return_weights"),
        ("Query", "query"),
        ("q", "query"),
        ("K", "key"),
    ]:
        with pytest.raises(
            TypeError, match=rf"attention\(\) got an unexpected keyword.*'{wrong}'; did you mean '{right}'"
        ):
            headway.attention(Q, K, V, **{wrong: None})
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zzzzz'$"):
        headway.attention(Q, K, V, zzzzz=1)
    with pytest.raises(TypeError, match=r"attention\(\) missing required argument: 'value'"):
        headway.attention(Q, K)
    with pytest.raises(TypeError, match=r"attention\(\) takes 3 positional arguments but 4 were given"):
        headway.attention(Q, K, V, None)
    with pytest.raises(TypeError, match="multiple values for argument 'query'"):
        headway.attention(Q, K, V, query=Q)
    with pytest.raises(TypeError, match="unexpected keyword argument 'return_lse'"):
        headway.attention_backward(Q, Q, K, V, Q, Q, return_lse=True)
    assert headway.attention(value=V, key=K, query=Q).shape == (2, 6, 5, 4)
    assert headway.attention(Q, K, V, **{"".join(["cau", "sal"]): False}).shape == (2, 6, 5, 4)


def test_out_may_not_overlap_an_input():
    x = np.zeros((8, 4))
    with pytest.raises(ValueError, match="attention: out overlaps query in memory"):
        headway.attention(x[:4], x[4:], x[4:], out=x[2:6])


def test_what_cannot_be_allocated_is_a_memory_error_and_the_next_call_works():
    wide = np.broadcast_to(np.float32(0), (1, 2**20, 2**20, 8))
    with pytest.raises(
        MemoryError, match=r"attention: could not allocate .* for out of shape \(1, 1048576, 1048576, 8\)"
    ):
        headway.attention(wide, wide, wide)
    assert headway.attention(Q, K, V).shape == (2, 6, 5, 4)


def test_a_matrix_past_2_63_bytes_is_a_value_error_whatever_else_is_asked_for():
    long = np.broadcast_to(np.float32(0), (1, 1, 2**33, 1))
    text = r"weights of shape \(1, 1, 8589934592, 8589934592\) would have more than 2\^63 bytes"
    with pytest.raises(ValueError, match=f"attention: {text}"):
        headway.attention(long, long, long, return_weights=True)


def test_a_number_of_heads_is_an_integer():
    x = np.ones((2, 3, 8))
    with pytest.raises(TypeError, match="multi_head_attention: the number of heads is 2.0, expected an integer"):
        headway.multi_head_attention(x, x, x, 2.0)
    with pytest.raises(TypeError, match="MultiHeadAttention: the number of heads is '2', expected an integer"):
        headway.MultiHeadAttention(8, "2")
    assert headway.multi_head_attention(x, x, x, np.int32(2)).shape == x.shape


def test_threads():
    before = headway.get_threads()
    try:
        headway.set_threads(3)
        assert headway.get_threads() == 3
        for bad in (0, -1, -(10**30)):
            with pytest.raises(ValueError, match="set_threads: expected 1 or more"):
                headway.set_threads(bad)
        for bad in (1.0, "2", None):
            with pytest.raises(TypeError, match=f"set_threads: n is {bad!r}, expected an integer"):
                headway.set_threads(bad)
        assert headway.get_threads() == 3
    finally:
        headway.set_threads(before)


def test_engines():
    there = headway.engines()
    assert "reference" in there and set(there) <= {"reference", "cpu", "cuda"}
    x = np.ones((3, 4))
    for engine in ("reference", "cpu", "cuda"):
        if engine in there and engine != "cuda":
            assert headway.explain(x, x, x, engine=engine).engine == engine
        else:
            with pytest.raises(NotImplementedError, match=f"attention: .*{engine}: "):
                headway.attention(x, x, x, engine=engine)
