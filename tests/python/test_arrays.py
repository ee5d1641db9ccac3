"""What an array may be: strides, read-only memory, empty axes, alignment, other libraries' objects."""

import array as array_module
import ctypes

import ml_dtypes
import numpy as np
import pytest

import headway
from cases import DTYPES, random_case


def strided_versions(array):
    """The same numbers under other strides."""
    yield array[..., ::-1].copy()[..., ::-1]
    yield np.asfortranarray(array)
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    wide[..., ::2] = array
    yield wide[..., ::2]
    flipped = array[::-1].copy()[::-1]
    flipped.flags.writeable = False
    yield flipped


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_change_no_bit(dtype):
    case = random_case(5, dtype, rank=4)
    expected = headway.attention(*case.inputs, **case.options)
    for versions in zip(*(strided_versions(array) for array in case.inputs)):
        assert headway.attention(*versions, **case.options).tobytes() == expected.tobytes()


def test_other_orders_are_views_and_out_may_be_strided():
    x = np.random.default_rng(0).standard_normal((2, 5, 3, 4))  # [B, S, H, D]
    expected = headway.attention(*3 * [np.ascontiguousarray(x.swapaxes(1, 2))])
    out = np.empty_like(x)
    headway.attention(*3 * [x.swapaxes(1, 2)], out=out.swapaxes(1, 2))
    assert np.array_equal(out.swapaxes(1, 2), expected)


def test_broadcast_arrays_are_read_in_place():
    one = np.random.default_rng(0).standard_normal((1, 1, 5, 4))
    wide = np.broadcast_to(one, (3, 2, 5, 4))
    assert np.array_equal(headway.attention(wide, wide, wide)[2, 1], headway.attention(one, one, one)[0, 0])
    out, lse = headway.attention(wide, wide, wide, return_lse=True)
    assert headway.attention_backward(out, wide, wide, wide, out, lse).key.shape == (3, 2, 5, 4)
    mask = np.broadcast_to(np.array(True), (3, 2, 5, 5))
    np.testing.assert_allclose(headway.attention(wide, wide, wide, mask=mask), out, atol=1e-14)


def test_zero_dimensional_masks_and_biases():
    x = np.random.default_rng(0).standard_normal((5, 4))
    plain = headway.attention(x, x, x)
    np.testing.assert_allclose(headway.attention(x, x, x, mask=np.array(True)), plain, atol=1e-14)
    np.testing.assert_allclose(headway.attention(x, x, x, mask=True), plain, atol=1e-14)
    assert not headway.attention(x, x, x, mask=np.False_).any()
    np.testing.assert_allclose(headway.attention(x, x, x, bias=3.0), plain, atol=1e-14)
    out, lse = headway.attention(x, x, x, bias=np.array(3.0), return_lse=True)
    assert headway.attention_backward(out, x, x, x, out, lse, bias=np.array(3.0)).bias.shape == ()


@pytest.mark.parametrize("empty_axis", range(4))
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_axes(empty_axis, dtype):
    shape = [2, 3, 4, 5]
    shape[empty_axis] = 0
    x = np.zeros(shape, DTYPES[dtype])
    out, weights, lse = headway.attention(x, x, x, return_weights=True, return_lse=True)
    assert out.shape == tuple(shape) and weights.shape == (*shape[:3], shape[2]) and lse.shape == tuple(shape[:3])
    gradients = headway.attention_backward(out, x, x, x, out, lse)
    assert gradients.query.shape == tuple(shape)
    headway.attention_scores(x, x)
    headway.explain(x, x, x)


def test_no_keys_at_all_give_zeros():
    q, k = np.ones((2, 3, 4, 5)), np.ones((2, 3, 0, 5))
    out, lse = headway.attention(q, k, k, return_lse=True)
    assert not out.any() and np.isneginf(lse).all()


def test_read_only_inputs_are_fine_and_a_read_only_out_is_not():
    x = np.ones((5, 4))
    x.flags.writeable = False
    lens = np.array([5])
    lens.flags.writeable = False
    out = headway.attention(x, x, x, valid_lens=lens, mask=np.broadcast_to(True, (5, 5)))
    out.flags.writeable = False
    with pytest.raises(ValueError, match="attention: out is read-only"):
        headway.attention(x, x, x, out=out)


def test_subclasses_of_ndarray():
    x = np.random.default_rng(0).standard_normal((5, 4))
    expected = headway.attention(x, x, x)
    for kind in (np.matrix, np.recarray):
        other = x.view(kind)
        assert np.array_equal(headway.attention(other, other, other), expected)
    with pytest.raises(TypeError, match="query is a masked array"):
        headway.attention(np.ma.masked_array(x), x, x)


def test_fields_of_records_are_read_in_place_where_their_strides_allow():
    packed = np.zeros((5, 4), [("flag", "u1"), ("x", "f4")])
    with pytest.raises(ValueError, match="has a stride of 5 bytes, expected a multiple of its element's 4"):
        headway.attention(packed["x"], packed["x"], packed["x"])
    aligned = np.zeros((5, 4), np.dtype([("flag", "u1"), ("x", "f4")], align=True))
    aligned["x"] = np.random.default_rng(0).standard_normal((5, 4))
    copies = 3 * [aligned["x"].copy()]
    assert np.array_equal(headway.attention(*3 * [aligned["x"]]), headway.attention(*copies))


def test_misaligned_memory_is_refused():
    x = np.frombuffer(bytearray(5 * 4 * 4 + 1), np.uint8)[1:].view(np.float32).reshape(5, 4)
    with pytest.raises(ValueError, match="aligned"):
        headway.attention(x, x, x)


def test_a_call_neither_changes_nor_keeps_its_inputs():
    import sys

    x = np.random.default_rng(0).standard_normal((5, 4))
    before, count = x.copy(), sys.getrefcount(x)
    for _ in range(10):
        headway.attention(x, x, x, bias=x @ x.T)
        with pytest.raises(ValueError):
            headway.attention(x, x, x, softcap=-1)
    assert np.array_equal(x, before) and sys.getrefcount(x) == count


def test_results_own_their_memory_and_leak_nothing():
    import resource

    x = np.zeros((1, 4, 256, 64), np.float32)

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    for _ in range(20):
        headway.attention(x, x, x, return_lse=True)
    before = peak()
    for _ in range(300):
        result = headway.attention(x, x, x, return_lse=True)
        assert result[0].flags.owndata
    assert peak() - before < 20_000  # kB; 300 results are 80 MB


def test_ml_dtypes_is_not_imported_for_other_types():
    import subprocess
    import sys

    program = "import sys, numpy as np, headway; x = np.ones((3, 4)); headway.attention(x, x, x)\n"
    program += "assert not {'ml_dtypes', 'torch', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_bfloat16_matches_rounded_float32():
    x = np.random.default_rng(0).standard_normal((2, 8, 16)).astype(ml_dtypes.bfloat16)
    wide = x.astype(np.float32)
    out, expected = headway.attention(x, x, x), headway.attention(wide, wide, wide)
    assert out.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(out.astype(np.float32), expected, atol=2**-7)


# ---- DLPack from anyone ----


class Exporter:
    """An object that only has DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OldExporter(Exporter):
    """From before DLPack 1.0: no keywords but stream."""

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()


@pytest.mark.parametrize("exporter", [Exporter, OldExporter])
def test_any_object_with_dlpack_is_an_array(exporter):
    x = np.random.default_rng(0).standard_normal((5, 4))
    other = exporter(x[:, ::-1])
    found = headway.attention(other, other, x, valid_lens=exporter(np.array([3])), mask=exporter(np.ones((5, 5), bool)))
    assert isinstance(found, np.ndarray)
    expected = headway.attention(x[:, ::-1], x[:, ::-1], x, valid_lens=[3], mask=np.ones((5, 5), bool))
    assert np.array_equal(found, expected)


def test_an_out_that_does_not_say_that_it_may_be_written_is_refused():
    x = np.ones((5, 4))
    result = np.empty_like(x)
    headway.attention(x, x, x, out=Exporter(result))
    assert np.array_equal(result, x)
    with pytest.raises(ValueError, match="out is read-only"):
        headway.attention(x, x, x, out=OldExporter(result))


class Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("rank", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("sizes", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Forged:
    """A DLPack tensor with any fields."""

    def __init__(self, *sizes, **fields):
        self.memory = (ctypes.c_float * 64)()
        self.sizes = (ctypes.c_int64 * len(sizes))(*sizes)
        values = {
            "data": ctypes.addressof(self.memory),
            "device": Device(1, 0),
            "rank": len(sizes),
            "code": 2,
            "bits": 32,
            "lanes": 1,
            "sizes": ctypes.addressof(self.sizes),
        }
        self.tensor = Tensor(**{**values, **fields})

    def __dlpack__(self, **keywords):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.tensor), b"dltensor", None)

    def __dlpack_device__(self):
        return (self.tensor.device.kind, self.tensor.device.index)


HUGE, NEGATIVE = (ctypes.c_int64 * 2)(2**31, 2**31), (ctypes.c_int64 * 2)(-1, 4)


def test_a_contiguous_dlpack_tensor_needs_no_strides():
    x = Forged(3, 4)
    assert headway.attention(x, x, x).shape == (3, 4)


def test_memory_on_a_gpu_is_refused_with_the_reason_and_never_copied():
    x = Forged(3, 4, device=Device(2, 1))
    if "cuda" not in headway.engines():
        for call in (
            lambda: headway.attention(x, x, x),
            lambda: headway.attention_scores(x, x),
            lambda: headway.explain(x, x, x),
        ):
            with pytest.raises(NotImplementedError, match=r"^\w+: no engine can run this \(cuda: "):
                call()
    host = np.ones((3, 4), np.float32)
    with pytest.raises(ValueError, match="attention: key is on cuda:1, query is on cpu"):
        headway.attention(host, x, host)
    with pytest.raises(NotImplementedError, match="attention: query is on DLPack's device 8"):
        headway.attention(Forged(3, 4, device=Device(8, 0)), host, host)


@pytest.mark.parametrize(
    "fields, error, text",
    [
        ({"code": 5, "bits": 64}, TypeError, "DLPack code 5 with 64 bits"),
        ({"code": 2, "bits": 8}, TypeError, "DLPack code 2 with 8 bits"),
        ({"lanes": 4}, TypeError, "DLPack code 2"),
        ({"rank": -1}, ValueError, "-1 axes"),
        ({"rank": 9}, ValueError, "9 axes"),
        ({"data": None}, ValueError, "no memory"),
        ({"sizes": ctypes.addressof(HUGE)}, ValueError, r"2\^63 bytes"),
        ({"sizes": ctypes.addressof(NEGATIVE)}, ValueError, r"shape \(-1, 4\)"),
    ],
)
def test_dlpack_tensors_that_cannot_be_are_refused(fields, error, text):
    x = Forged(3, 4, **fields)
    with pytest.raises(error, match=f"attention: query .*{text}"):
        headway.attention(x, x, x)


def test_what_is_no_array_is_refused_by_name():
    x = np.ones((3, 4))
    for nothing in ([[1.0]], 3.0, None, "text", b"bytes", object(), array_module.array("d", [1.0]), memoryview(x), {}):
        with pytest.raises(TypeError, match=f"query must be an array .*found {type(nothing).__name__}"):
            headway.attention(nothing, x, x)


# ---- Memory on a GPU, as far as it can be tested without one ----


class OnGpu(Forged):
    """Says that it is on a GPU, and remembers how it was asked for its memory."""

    def __init__(self, *sizes, **fields):
        super().__init__(*sizes, device=Device(2, 0), **fields)
        self.asked = []

    def __dlpack__(self, **keywords):
        self.asked.append(keywords)
        return super().__dlpack__(**keywords)


class BeforeDlpack1(OnGpu):
    def __dlpack__(self, *, stream):
        self.asked.append({"stream": stream})
        return Forged.__dlpack__(self)


def test_a_library_is_told_the_stream_for_memory_on_a_gpu_and_only_there():
    x = OnGpu(3, 4)
    old = BeforeDlpack1(3, 4)
    here = np.ones((3, 4), np.float32)
    for query in (x, old):
        with pytest.raises((NotImplementedError, ValueError)):
            headway.explain(query, here, here)
    assert x.asked == [{"stream": 1, "max_version": (1, 0)}]
    assert old.asked == [{"stream": 1}]
    asked = []

    class OnHost(Forged):
        def __dlpack__(self, **keywords):
            asked.append(keywords)
            return super().__dlpack__()

    headway.attention(OnHost(3, 4), here, here)
    assert asked == [{"max_version": (1, 0)}]


def test_arrays_of_two_libraries_on_a_gpu_are_refused():
    x = OnGpu(3, 4)
    Other = type("Other", (OnGpu,), {"__module__": "other_library"})
    text = "attention: value is on a GPU and comes from other_library, query from test_arrays: expected arrays of one"
    with pytest.raises(ValueError, match=text):
        headway.attention(x, x, Other(3, 4))


@pytest.mark.skipif("cuda" in headway.engines(), reason="with a GPU these run there, and what says it is on one is not")
def test_what_runs_on_a_gpu_alone_says_so_without_one():
    x = OnGpu(3, 4)
    for call in (lambda: headway.analyze(x, x), lambda: headway.weights_in(x, x, (0, 1), (0, 1))):
        with pytest.raises(NotImplementedError, match="the tensors are on cuda:0, and it reads host memory only"):
            call()


def test_what_has_no_way_on_a_gpu_says_so():
    x = OnGpu(3, 4)
    with pytest.raises(NotImplementedError, match="MultiHeadAttention: queries is on cuda, and this layer is NumPy's"):
        headway.MultiHeadAttention(4, 2).forward(x, x, x)
    here = np.ones((3, 4), np.float32)
    short = OnGpu(1, code=0, bits=16)
    with pytest.raises(TypeError, match="valid_lens has type .*, expected i32 or i64 on cuda:0"):
        headway.attention(here, here, here, valid_lens=short)


# ---- Gradients where the caller wants them ----


def test_gradients_are_written_where_they_are_wanted():
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 4))
    bias = np.zeros((5, 5))
    out, lse = headway.attention(x, x, x, bias=bias, return_lse=True)
    expected = headway.attention_backward(x, x, x, x, out, lse, bias=bias)
    joined = np.empty((2, 5, 3, 3, 4)).transpose(2, 0, 3, 1, 4)
    place = np.empty((5, 5), np.float32)
    found = headway.attention_backward(x, x, x, x, out, lse, bias=bias, gradients=[joined[0], None, joined[2], place])
    assert np.shares_memory(found.query, joined) and np.shares_memory(found.value, joined)
    assert found.bias is place and not np.shares_memory(found.key, joined)
    for one, other in zip(found[:3], expected[:3]):
        assert np.array_equal(one, other)
    assert np.allclose(place, expected.bias, atol=1e-6)
    starts = [0, 5]
    rows = np.ascontiguousarray(x[0].swapaxes(0, 1))
    out, lse = headway.attention_varlen(rows, rows, rows, starts, starts, return_lse=True)
    place = headway.Gradients(*(np.empty_like(rows) for _ in range(3)))
    found = headway.attention_varlen_backward(rows, rows, rows, rows, out, lse, starts, starts, gradients=place)
    assert all(one is other for one, other in zip(found[:3], place[:3]))


@pytest.mark.parametrize(
    "gradients, error, text",
    [
        (np.ones((3, 4)), TypeError, "gradients is a ndarray, expected a headway.Gradients or a sequence"),
        (3, TypeError, "gradients is a int"),
        ([None] * 6, TypeError, "gradients is a list, expected .* at most its 5 arrays"),
        ([np.ones((3, 3))], ValueError, r"dq has shape \(3, 3\), expected \(3, 4\)"),
        ([[1.0]], TypeError, "the query's gradient must be an array"),
        ([np.ones((3, 4), np.float32)], TypeError, "dq has type f32"),
    ],
)
def test_places_for_gradients_that_do_not_fit(gradients, error, text):
    x = np.ones((3, 4))
    out, lse = headway.attention(x, x, x, return_lse=True)
    with pytest.raises(error, match=f"attention_backward: {text}"):
        headway.attention_backward(x, x, x, x, out, lse, gradients=gradients)
