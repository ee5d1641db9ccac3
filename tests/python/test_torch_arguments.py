"""Arguments of the wrong kind in headway.torch: the error begins with the function that was called, and names them."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import headway  # noqa: E402
import headway.torch as ht  # noqa: E402
from headway import masks  # noqa: E402

Q = torch.randn(1, 2, 4, 8)
PACKED, BOUNDS = torch.randn(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
ARRAY = np.zeros((2, 3))


def refused(call, error, *words):
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert text.startswith(f"{words[0]}:") and len(text) < 400, text
    for word in words[1:]:
        assert word in text, text


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("attention", lambda **given: ht.attention(Q, Q, Q, **given)),
        ("attention_varlen", lambda **given: ht.attention_varlen(PACKED, PACKED, PACKED, BOUNDS, BOUNDS, **given)),
    ],
)
def test_options_are_named(operation, call):
    for name in ("valid_lens", "query_lens", "spans", "alibi_slopes", "sinks"):
        refused(lambda name=name: call(**{name: "abc"}), TypeError, operation, f"{name} is 'abc'")
        refused(lambda name=name: call(**{name: [[1.0], [1.0, 2.0]]}), ValueError, operation, name)
    refused(lambda: call(valid_lens=10**30), ValueError, operation, "valid_lens")
    for value in ([1], {}, ARRAY, masks.causal()):
        refused(lambda value=value: call(dropout=value), TypeError, operation, "dropout is", "expected a number")
    for name in ("causal", "layout", "window", "batch_invariant"):
        refused(lambda name=name: call(**{name: ARRAY}), TypeError, operation, f"{name} is array")
    refused(lambda: call(dropout=0.1, seed=torch.zeros(3, dtype=torch.int64)), TypeError, operation, "seed", "(3,)")
    refused(lambda: call(dropout=0.1, seed=torch.tensor(1.5)), TypeError, operation, "seed", "torch.float32")


def test_out_is_a_tensor():
    refused(lambda: ht.attention(Q, Q, Q, out="abc"), TypeError, "attention", "out is a str")


def test_the_largest_seed_is_taken():
    one = ht.attention(Q, Q, Q, dropout=0.5, seed=2**64 - 1)
    assert torch.equal(one, ht.attention(Q, Q, Q, dropout=0.5, seed=torch.tensor(-1)))
    refused(lambda: ht.attention(Q, Q, Q, dropout=0.5, seed=2**64), ValueError, "attention", "seed")


def test_a_window_past_64_bits_is_taken_as_attention_takes_it():
    expected = ht.attention(Q, Q, Q)
    for window in ((2**63, 0), (0, 10**30), (2**63, 2**64), (np.uint64(2**63), None)):
        one = ht.attention(Q, Q, Q, window=window)
        assert torch.equal(one, torch.from_numpy(headway.attention(*3 * [Q.numpy()], window=window)))
        with FlopCounterMode(display=False):  # the operator
            assert torch.equal(one, ht.attention(Q, Q, Q, window=window))
    assert torch.equal(expected, one)
    refused(lambda: ht.attention(Q, Q, Q, window=(-(2**70), 0)), ValueError, "attention", "window left is -11805")


def test_bounds_of_packed_sequences_are_named():
    refused(lambda: ht.attention_varlen(PACKED, PACKED, PACKED, "abc", BOUNDS), TypeError, "attention_varlen", "cu_seq")


def test_torchs_function_names_its_numbers():
    name = "scaled_dot_product_attention"
    call = ht.scaled_dot_product_attention
    refused(lambda: call(Q, Q, Q, dropout_p=[0.1]), TypeError, name, "dropout_p is [0.1]", "expected a number")
    refused(lambda: call(Q, Q, Q, scale=ARRAY), TypeError, name, "scale is array")


def test_flash_attentions_functions_name_their_arguments():
    for name, call in (
        ("flash_attn_func", lambda **given: ht.flash_attn_func(Q, Q, Q, **given)),
        ("flash_attn_varlen_func", lambda **given: ht.flash_attn_varlen_func(*[PACKED] * 3, *[BOUNDS] * 2, **given)),
    ):
        refused(lambda call=call: call(causal=ARRAY), TypeError, name, "causal is array")
        refused(lambda call=call: call(softcap=[1]), TypeError, name, "softcap is [1]")
        refused(lambda call=call: call(dropout_p=[1]), TypeError, name, "dropout_p is [1]")


def test_a_refused_call_leaves_the_key_cache_as_it_was():
    name = "flash_attn_with_kvcache"
    q, cache, new = torch.randn(1, 1, 2, 8), torch.zeros(1, 16, 2, 8), torch.randn(1, 1, 2, 8)
    for given, words in (
        ({"window_size": 3}, "window_size is 3"),
        ({"softcap": [1]}, "softcap is [1]"),
        ({"causal": ARRAY}, "causal is array"),
        ({"alibi_slopes": "abc"}, "alibi_slopes is a str"),
    ):
        refused(
            lambda given=given: ht.flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=0, **given),
            (TypeError, ValueError),
            name,
            words,
        )
        assert not cache.any()


def test_the_module_names_its_arguments():
    refused(lambda: ht.MultiheadAttention("8", 2), TypeError, "MultiheadAttention", "embed_dim is '8'")
    refused(lambda: ht.MultiheadAttention(8, None), TypeError, "MultiheadAttention", "num_heads is None")
    refused(lambda: ht.MultiheadAttention(8, 2, kdim=-1), ValueError, "MultiheadAttention", "kdim is -1")
    refused(lambda: ht.MultiheadAttention(8, 2, vdim=2.5), TypeError, "MultiheadAttention", "vdim is 2.5")
    refused(lambda: ht.MultiheadAttention(8, 2, dropout="0.1"), TypeError, "MultiheadAttention", "dropout is '0.1'")


def test_a_number_that_is_learnt_is_refused_and_not_taken_for_a_constant():
    learnt, x = torch.nn.Parameter(torch.tensor(0.5)), torch.randn(1, 2, 5, 8)
    rows = x[0].transpose(0, 1)
    remedy = "requires grad, and has no gradient: multiply"
    for call, name, words in (
        (lambda n: ht.attention(x, x, x, scale=n), "attention", f"scale {remedy} query by it and pass scale=1"),
        (lambda n: ht.attention(x, x, x, softcap=n), "attention", "softcap requires grad, and has no gradient"),
        (lambda n: ht.attention(x, x, x, dropout=n), "attention", "dropout requires grad, and has no gradient"),
        (lambda n: ht.attention_varlen(rows, rows, rows, [0, 5], [0, 5], scale=n), "attention_varlen", remedy),
        (lambda n: ht.scaled_dot_product_attention(x, x, x, scale=n), "scaled_dot_product_attention", remedy),
        (lambda n: ht.flash_attn_func(x, x, x, softmax_scale=n), "flash_attn_func", f"softmax_scale {remedy} q by it"),
        (lambda n: ht.rope(x, range(5), base=n), "rope", "base requires grad, and has no gradient"),
    ):
        refused(lambda call=call: call(learnt), ValueError, name, words)
        refused(lambda call=call: call(learnt.exp()), ValueError, name, words)
        with torch.no_grad():
            call(learnt)
        call(learnt.detach())
    assert torch.equal(ht.attention(x, x, x, scale=learnt.detach()), ht.attention(x, x, x, scale=0.5))
