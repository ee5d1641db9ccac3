"""Types of the compiled part."""

from collections.abc import Sequence
from typing import Any, Literal, TypedDict, TypeVar, overload

from typing_extensions import Unpack

from headway._results import Analysis, Gradients

# A NumPy array, or any array with DLPack: what comes in is what goes out.
_Array = TypeVar("_Array")
_Integers = int | Sequence[int] | Sequence[Sequence[int]] | Any
_Floats = float | Sequence[float] | Any

class Mask:
    @property
    def batch(self) -> int: ...
    @property
    def heads(self) -> int: ...
    def __and__(self, other: Mask, /) -> Mask: ...
    def __or__(self, other: Mask, /) -> Mask: ...
    def __copy__(self) -> Mask: ...
    def __deepcopy__(self, memo: Any, /) -> Mask: ...
    def pairs(self, queries: int, keys: int) -> int: ...
    def draw(self, queries: int, keys: int) -> str: ...
    def to_bool(self, queries: int, keys: int) -> Any: ...
    def spans(self, queries: int, keys: int) -> tuple[Any, int]: ...

def mask_parts(mask: Mask, queries: int, keys: int, /) -> tuple[Any, int, Any]: ...
def mask_packed_parts(mask: Mask, cu_seqlens_q: Any, cu_seqlens_k: Any, /) -> tuple[Any, int, Any]: ...
def mask_causal() -> Mask: ...
def mask_window(sides: tuple[int | None, int | None], /) -> Mask: ...
def mask_first(n: _Integers, /) -> Mask: ...
def mask_prefix(n: _Integers, /) -> Mask: ...
def mask_documents(ids: _Integers, key_ids: _Integers | None, /) -> Mask: ...
def mask_documents_of(lengths: _Integers, /) -> Mask: ...
def mask_blocks(keep: Any, query_size: int, key_size: int, /) -> Mask: ...
def mask_tree(parents: _Integers, /) -> Mask: ...
def mask_spans(array: _Integers, rows: int, /) -> Mask: ...
def mask_dense(array: Any, /) -> Mask: ...
def mask_from_bool(array: Any, /) -> Mask: ...

class Options(TypedDict, total=False):
    mask: Mask | Any | None
    bias: Any | None
    causal: bool | Literal["top_left", "bottom_right"]
    window: tuple[int | None, int | None] | None
    valid_lens: _Integers | None
    query_lens: _Integers | None
    spans: _Integers | None
    span_rows: int
    scale: float | None
    softcap: float | None
    alibi_slopes: _Floats | None
    sinks: _Floats | None
    dropout: float
    seed: int | None
    engine: Literal["reference", "cpu", "cuda"] | None
    batch_invariant: bool
    layout: Literal["bhsd", "bshd"]

__version__: str
xla_handlers: dict[str, dict[str, Any]]  # for each platform of XLA, PyCapsules by the names of headway.jax's targets

class Plan:
    @property
    def engine(self) -> str: ...
    @property
    def operation(self) -> str: ...
    @property
    def kernel(self) -> str: ...
    @property
    def instruction_set(self) -> str: ...
    @property
    def shape(self) -> str: ...
    @property
    def options(self) -> str: ...
    @property
    def query_block(self) -> int: ...
    @property
    def key_block(self) -> int: ...
    @property
    def tasks(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def pairs(self) -> int: ...
    @property
    def all_pairs(self) -> int: ...
    @property
    def flops(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def passed_over(self) -> list[tuple[str, str]]: ...
    @property
    def passed_kernels(self) -> list[tuple[str, str]]: ...

def save_layer(parameters: dict[str, Any], heads: int, path: bytes, overwrite: bool) -> None: ...
def load_layer(path: bytes) -> tuple[dict[str, Any], int]: ...

class TraceData:
    @property
    def title(self) -> str: ...
    @property
    def options(self) -> str: ...
    @property
    def query_tokens(self) -> list[str]: ...
    @property
    def key_tokens(self) -> list[str]: ...
    def steps(self) -> list[tuple[Any, ...]]: ...
    def text(self) -> str: ...
    def page(self) -> str: ...
    def save(self, path: bytes, overwrite: bool, /) -> None: ...

@overload
def attention(
    query: _Array,
    key: Any,
    value: Any,
    *,
    return_weights: Literal[False] = False,
    return_lse: Literal[False] = False,
    out: Any | None = None,
    **options: Unpack[Options],
) -> _Array: ...
@overload
def attention(
    query: _Array,
    key: Any,
    value: Any,
    *,
    return_weights: Literal[True],
    return_lse: Literal[False] = False,
    out: Any | None = None,
    **options: Unpack[Options],
) -> tuple[_Array, _Array]: ...
@overload
def attention(
    query: _Array,
    key: Any,
    value: Any,
    *,
    return_weights: Literal[False] = False,
    return_lse: Literal[True],
    out: Any | None = None,
    **options: Unpack[Options],
) -> tuple[_Array, Any]: ...
@overload
def attention(
    query: _Array,
    key: Any,
    value: Any,
    *,
    return_weights: Literal[True],
    return_lse: Literal[True],
    out: Any | None = None,
    **options: Unpack[Options],
) -> tuple[_Array, _Array, Any]: ...
@overload
def attention(
    query: _Array,
    key: Any,
    value: Any,
    *,
    return_weights: bool = False,
    return_lse: bool = False,
    out: Any | None = None,
    **options: Unpack[Options],
) -> Any: ...
def torch_attention(
    query: Any, key: Any, value: Any, options: Any, return_weights: bool, return_lse: bool, out: Any | None, /
) -> Any: ...
def torch_attention_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    options: Any,
    gradients: Any | None,
    bias_gradient: bool,
    /,
) -> Any: ...
def torch_prepare(switches: dict[str, Any], record: Any, /) -> None: ...
def torch_sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    /,
) -> Any | None: ...
def torch_sdpa_node(context: Any, query: Any, key: Any, value: Any, bias: Any | None, results: Any, /) -> Any: ...
def torch_sdpa_backward(context: Any, grad_out: Any, /) -> Any | None: ...

_Ranges = list[list[tuple[int, int]]]

def distributed_contiguous(queries: list[int], keys: list[int]) -> tuple[_Ranges, _Ranges]: ...
def distributed_even(queries: int, keys: int, ranks: int) -> tuple[_Ranges, _Ranges]: ...
def distributed_zigzag(queries: int, keys: int, ranks: int) -> tuple[_Ranges, _Ranges]: ...
def distributed_balanced(
    sizes: tuple[int, ...],
    ranks: int,
    *,
    cu_seqlens_q: _Integers | None = None,
    cu_seqlens_k: _Integers | None = None,
    **options: Unpack[Options],
) -> tuple[_Ranges, _Ranges]: ...
def distributed_explain(
    sizes: tuple[int, ...],
    sharding: tuple[_Ranges, _Ranges],
    *,
    cu_seqlens_q: _Integers | None = None,
    cu_seqlens_k: _Integers | None = None,
    scheme: str | None = None,
    cluster: tuple[float, ...] | None = None,
    backward: bool = False,
    with_text: bool = False,
    **options: Unpack[Options],
) -> tuple[str, str, float, float, float, float, float, float]: ...
def distributed_schedule(
    sizes: tuple[int, ...],
    sharding: tuple[_Ranges, _Ranges],
    rank: int,
    *,
    scheme: str | None = None,
    backward: bool = False,
    **options: Unpack[Options],
) -> tuple[int, list[tuple[int, int, int, int, int, bool]], list[tuple[int, tuple[int, int], tuple[int, int]]]]: ...
def distributed_part(query: Any, key: Any, value: Any, offset: int, **options: Unpack[Options]) -> Any: ...
def distributed_part_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    offset: int,
    *,
    wants_dbias: bool = False,
    **options: Unpack[Options],
) -> Any: ...
def distributed_attention(
    transport: Any,
    query: Any,
    key: Any,
    value: Any,
    *,
    cu_seqlens_q: _Integers | None = None,
    cu_seqlens_k: _Integers | None = None,
    scheme: str | None = None,
    cluster: tuple[float, ...] | None = None,
    sharding: tuple[_Ranges, _Ranges] | None = None,
    **options: Unpack[Options],
) -> Any: ...
def distributed_attention_backward(
    transport: Any,
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    *,
    cu_seqlens_q: _Integers | None = None,
    cu_seqlens_k: _Integers | None = None,
    scheme: str | None = None,
    cluster: tuple[float, ...] | None = None,
    sharding: tuple[_Ranges, _Ranges] | None = None,
    wants_dbias: bool = False,
    **options: Unpack[Options],
) -> Any: ...
def attention_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    *,
    gradients: Sequence[Any | None] | None = None,
    bias_gradient: bool = True,
    **options: Unpack[Options],
) -> Gradients: ...
def attention_scores(
    query: _Array,
    key: Any,
    *,
    stage: Literal["scaled", "capped", "biased", "weights"] = "weights",
    out: Any | None = None,
    **options: Unpack[Options],
) -> _Array: ...
@overload
def attention_varlen(
    query: _Array,
    key: Any,
    value: Any,
    cu_seqlens_q: _Integers,
    cu_seqlens_k: _Integers,
    *,
    return_weights: Literal[False] = False,
    return_lse: Literal[False] = False,
    out: Any | None = None,
    **options: Unpack[Options],
) -> _Array: ...
@overload
def attention_varlen(
    query: _Array,
    key: Any,
    value: Any,
    cu_seqlens_q: _Integers,
    cu_seqlens_k: _Integers,
    *,
    return_weights: Literal[False] = False,
    return_lse: Literal[True],
    out: Any | None = None,
    **options: Unpack[Options],
) -> tuple[_Array, Any]: ...
def attention_paged(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    block_table: _Integers,
    lengths: _Integers,
    *,
    cu_seqlens_q: _Integers | None = None,
    key_scales: Any | None = None,
    value_scales: Any | None = None,
    return_weights: Literal[False] = False,
    return_lse: bool = False,
    out: Any | None = None,
    **options: Unpack[Options],
) -> Any: ...
def attend_cache(
    cache: Cache,
    ids: _Integers,
    query: Any,
    *,
    cu_seqlens: _Integers | None = None,
    return_weights: Literal[False] = False,
    return_lse: bool = False,
    out: Any | None = None,
    **options: Unpack[Options],
) -> Any: ...
def attention_varlen_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: _Integers,
    cu_seqlens_k: _Integers,
    *,
    gradients: Sequence[Any | None] | None = None,
    bias_gradient: bool = True,
    **options: Unpack[Options],
) -> Gradients: ...
def explain(
    query: Any,
    key: Any,
    value: Any,
    *,
    return_weights: bool = False,
    return_lse: bool = False,
    out: Any | None = None,
    backward: bool = False,
    **options: Unpack[Options],
) -> Plan: ...
def analyze(
    query: Any,
    key: Any,
    *,
    top: int = 8,
    near: tuple[int | None, int | None] = (64, 64),
    cells: int = 256,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> Analysis: ...
def weights_in(
    query: _Array,
    key: Any,
    rows: tuple[int, int],
    keys: tuple[int, int],
    *,
    lse: Any | None = None,
    **options: Unpack[Options],
) -> _Array: ...
def mean_weights(query: _Array, key: Any, lse: Any, **options: Unpack[Options]) -> _Array: ...
def trace(
    query: Any,
    key: Any,
    value: Any,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    weights: dict[str, Any] | None = None,
    tokens: list[str] | None = None,
    query_tokens: list[str] | None = None,
    title: str | None = None,
    **options: Unpack[Options],
) -> TraceData: ...

class ViewLayer: ...

def view_layer(query: Any, key: Any, **options: Unpack[Options]) -> ViewLayer: ...
def write_view(
    layers: list[ViewLayer],
    path: bytes,
    title: str,
    key_tokens: list[str],
    query_tokens: list[str],
    head_names: list[str],
    name_options: bool,
    overwrite: bool,
    progress: bool | None,
) -> None: ...

class LiveView:
    def __init__(
        self,
        layers: list[ViewLayer],
        title: str,
        key_tokens: list[str],
        query_tokens: list[str],
        head_names: list[str],
        name_options: bool,
        progress: bool | None,
    ) -> None: ...
    def address(self, own_host: str) -> str: ...
    def answer(self, target: str, host: str, own_host: str) -> tuple[int, dict[str, str], bytes]: ...

def rotate(x: _Array, positions: _Integers, settings: dict[str, Any], back: bool, out: Any | None) -> _Array: ...
def rope_frequencies(head_dim: int, settings: dict[str, Any]) -> tuple[list[float], float]: ...

class Cache:
    def __init__(self, settings: dict[str, Any]) -> None: ...
    def described(self) -> dict[str, Any]: ...
    def free_pages(self) -> int: ...
    def ids(self) -> list[int]: ...
    def length(self, id: int, /) -> int: ...
    def add(self) -> int: ...
    def fork(self, id: int, /) -> int: ...
    def truncate(self, id: int, length: int, /) -> None: ...
    def remove(self, id: int, /) -> None: ...
    def append(self, ids: _Integers, key: Any, value: Any | None, cu_seqlens: _Integers | None) -> None: ...
    def read(self, id: int, begin: int, end: int, /) -> tuple[Any, Any]: ...
    def save(self, path: bytes, overwrite: bool, /) -> None: ...
    @staticmethod
    def load(path: bytes, device: int, /) -> Cache: ...

def set_threads(n: int, /) -> None: ...
def get_threads() -> int: ...
def release_memory() -> int: ...
def share_openmp_threads(path: str, /) -> bool: ...
def engines() -> list[str]: ...
