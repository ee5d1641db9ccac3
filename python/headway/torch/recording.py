"""What a model attends to, recorded while it runs."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from headway import _headway
from headway._errors import named
from headway._page import Page, in_frame
from headway._results import Analysis
from headway._server import ViewServer
from headway._view import Group, Texts, show, show_together, together
from headway.torch import sdpa
from headway.torch._core import Options
from headway.torch._dispatch import recorders
from headway.torch.hugging_face import register_with_transformers
from headway.torch.swap import swapped

_REGISTERED = "headway"


@dataclass(frozen=True, eq=False)
class Call:
    """One call of attention: queries, keys and options as headway.analyze takes them, and whose call it was."""

    name: str  # the module inside the model, "encoder.layer.3.attention.self"
    query: Tensor  # (B, H, Sq, D), or fewer axes
    key: Tensor  # (B, Hkv, Sk, D)
    options: dict[str, Any] = field(default_factory=dict)
    forward: int = 0  # the number of the outermost call, of the model or of a part of it, that this one was in

    def item(self, number: int) -> Call:
        """The same for one item of the batch, which keeps its axis."""
        if self.query.dim() < 3:
            return self
        batch = self.query.shape[0]
        if not 0 <= number < batch:
            raise ValueError(f"record: item is {number}, expected 0 to {batch - 1}")
        # Masks, biases and spans have a batch axis where they have all axes, lengths in front.
        axes = self.query.dim()
        per_item = {"mask": axes, "bias": axes, "valid_lens": 0, "query_lens": 0, "spans": axes + 1}
        options = dict(self.options)
        for name, least in per_item.items():
            value = options.get(name)
            if value is not None and value.dim() >= least and value.shape[0] == batch:
                options[name] = value[number : number + 1]
        part = slice(number, number + 1)
        return Call(self.name, self.query[part], self.key[part], options, self.forward)


class Recording:
    """What record() saw: calls in their order, and runs of the model, each a list with one call for each layer.

    >>> import torch, headway.torch
    >>> layer = torch.nn.TransformerEncoderLayer(d_model=32, nhead=4, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False).eval()
    >>> with torch.no_grad(), headway.torch.record(model) as recording:
    ...     out = model(torch.randn(1, 10, 32))
    >>> recording
    <Recording: 2 calls in 1 run of 2 layers>
    >>> [analysis.entropy.shape for analysis in recording.analyze()]
    [torch.Size([1, 4, 10]), torch.Size([1, 4, 10])]
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []

    @property
    def runs(self) -> list[list[Call]]:
        """The calls of each run: a layer that another forward calls again begins the next one, as each new token does.

        A layer that one forward calls several times, as models that share a layer do, stays in its run.
        """
        runs: list[list[Call]] = []
        seen: dict[str, int] = {}
        for call in self.calls:
            if not runs or seen.get(call.name, call.forward) != call.forward:
                runs.append([])
                seen = {}
            seen[call.name] = call.forward
            runs[-1].append(call)
        return runs

    def layers(self, run: int = 0) -> list[Call]:
        """The calls of one run, one for each layer."""
        runs = self.runs
        if not runs:
            raise ValueError(
                "record: no attention was recorded: nothing ran, or the model has attention of its own kind"
            )
        if not -len(runs) <= run < len(runs):
            raise ValueError(f"record: run is {run}, expected 0 to {len(runs) - 1}")
        return runs[run]

    def analyze(self, *, run: int = 0, **asked: Any) -> list[Analysis]:
        """headway.analyze for each layer of a run; asked is top, near, cells and progress."""
        return [_headway.analyze(call.query, call.key, **call.options, **asked) for call in self.layers(run)]

    @overload
    def view(
        self,
        *,
        tokens: Iterable[str] | None = None,
        query_tokens: Iterable[str] | None = None,
        title: str = "Attention",
        run: int = 0,
        item: int = 0,
        layers: Iterable[int] | None = None,
        path: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        serve: Literal[False] = False,
        port: int = 0,
        progress: bool | None = None,
    ) -> Page: ...
    @overload
    def view(
        self,
        *,
        tokens: Iterable[str] | None = None,
        query_tokens: Iterable[str] | None = None,
        title: str = "Attention",
        run: int = 0,
        item: int = 0,
        layers: Iterable[int] | None = None,
        path: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        serve: Literal[True],
        port: int = 0,
        progress: bool | None = None,
    ) -> ViewServer: ...
    def view(
        self,
        *,
        tokens: Iterable[str] | None = None,
        query_tokens: Iterable[str] | None = None,
        title: str = "Attention",
        run: int = 0,
        item: int = 0,
        layers: Iterable[int] | None = None,
        path: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        serve: bool = False,
        port: int = 0,
        progress: bool | None = None,
    ) -> Page | ViewServer:
        """headway.view of all layers and heads in one page, for one item of the batch of one run.

        Layers of different lengths, as a model with an encoder and a decoder has them, are in one file too, of which
        the page shows those of one length at a time: the encoder's, the decoder's, those between them. tokens is then
        one of the two texts, query_tokens the other, and each goes where its length fits. serve=True shows layers of
        one length; layers says which ones, by their number in the run.
        """
        groups = self._groups(tokens, query_tokens, title, run, item, layers)
        if len(groups) == 1:
            return show(*groups[0][1:], path, overwrite, serve, port, progress)
        if serve:
            found = "; ".join(name for name, _, _ in groups)
            raise ValueError(
                f"record: serve=True shows layers of one length, found {found}: pass some of them as layers"
            )
        return show_together(groups, title, path, overwrite, progress)

    def _groups(
        self,
        tokens: Iterable[str] | None,
        query_tokens: Iterable[str] | None,
        title: str,
        run: int,
        item: int,
        layers: Iterable[int] | None,
    ) -> list[Group]:
        """What the page of one run shows: its layers by their lengths."""
        run_calls = self.layers(run)
        chosen = range(len(run_calls)) if layers is None else list(layers)
        for number in chosen:
            if not 0 <= number < len(run_calls):
                raise ValueError(f"record: layers has {number}, expected 0 to {len(run_calls) - 1}")
        calls = {number: run_calls[number].item(item) for number in chosen}
        sizes = {number: (int(call.query.shape[-2]), int(call.key.shape[-2])) for number, call in calls.items()}
        if not calls:
            raise ValueError("record: layers is empty, expected the numbers of some")
        if len(set(sizes.values())) == 1:
            return [("", *_page(calls, title, tokens, query_tokens, *next(iter(sizes.values()))))]
        side = _sides(tokens, query_tokens, sizes.values())
        groups: list[Group] = []
        for queries, keys in dict.fromkeys(sizes.values()):
            own = {number: call for number, call in calls.items() if sizes[number] == (queries, keys)}
            kinds = ", ".join(dict.fromkeys(re.sub(r"\.?\b\d+\b", "", call.name) for call in own.values()))
            name = f"{kinds or 'layers'} ({queries} x {keys})"
            groups.append((name, *_page(own, title, side(keys, 0), side(queries, 1), queries, keys)))
        return groups

    def __repr__(self) -> str:
        runs = self.runs
        layers = f" of {_counted(len(runs[0]), 'layer')}" if runs else ""
        return f"<Recording: {_counted(len(self.calls), 'call')} in {_counted(len(runs), 'run')}{layers}>"

    def _repr_html_(self) -> str | None:
        """In a notebook, the page of the first run; None, which shows the line above, where no one page holds it."""
        try:
            return in_frame(together(self._groups(None, None, "Attention", 0, 0, None), "Attention"))
        except (ValueError, NotImplementedError):
            return None


@contextmanager
def record(model: nn.Module, *, device: torch.device | str | None = None) -> Iterator[Recording]:
    """Records the queries and keys of every attention layer of the model while it runs, and what masks them.

    Inside the with block the model runs as always; its attention is computed by Headway, and no weight is stored. Seen
    are torch.nn.MultiheadAttention, Headway's own modules and functions, Hugging Face models, and every other call of
    torch.nn.functional.scaled_dot_product_attention. Afterwards the model is what it was.

    Recording.analyze gives the statistics of each layer, Recording.view the page that shows all layers and heads.
    Queries and keys are kept, as much as the model's own for one run, on the device where the model runs, and are
    analyzed there; device="cpu" keeps them in host memory. Of a generation, the keys of a cache that grows are kept
    once.

    >>> import torch, headway.torch
    >>> model = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval()
    >>> x = torch.randn(1, 10, 32)
    >>> with headway.torch.record(model) as recording:
    ...     out, weights = model(x, x, x, average_attn_weights=False)
    >>> call = recording.calls[0]
    >>> torch.allclose(headway.attention_scores(call.query, call.key, **call.options), weights, atol=1e-6)
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"record: model is a {type(model).__name__}, expected a torch.nn.Module")
    recording, places, kept = Recording(), _Places(model), _Kept(device)

    def take(query: Tensor, key: Tensor, options: Options) -> None:
        if options.packed:
            raise NotImplementedError("record: packed sequences (attention_varlen) cannot be recorded")
        name, forward = places.here(), places.forward()
        keywords = options._replace(dropout=0.0, seed=None, engine=None).keywords()
        own = {word: kept.option(x, forward) if isinstance(x, Tensor) else x for word, x in keywords.items()}
        recording.calls.append(Call(name, kept.copy(query), kept.keys(name, key, forward), own, forward))

    with ExitStack() as stack:
        stack.enter_context(places)
        stack.enter_context(swapped(model))
        stack.enter_context(_through_headway(model))
        stack.enter_context(_Functions(take))
        recorders.append(take)
        stack.callback(recorders.remove, take)
        yield recording


def _page(
    calls: dict[int, Call],
    title: str,
    tokens: Iterable[str] | None,
    query_tokens: Iterable[str] | None,
    queries: int,
    keys: int,
) -> tuple[list[_headway.ViewLayer], Texts]:
    """Calls of one length, by their number in the run, as a page takes them."""
    with named("view"):
        owned = [_headway.view_layer(call.query, call.key, **call.options) for call in calls.values()]
    names = [
        f"layer {number}, head {head}"
        for number, call in calls.items()
        for head in range(call.query.shape[1] if call.query.dim() == 4 else 1)
    ]
    return owned, Texts(title, tokens, query_tokens, names, queries, keys)


def _sides(
    tokens: Iterable[str] | None, query_tokens: Iterable[str] | None, sizes: Iterable[tuple[int, int]]
) -> Callable[[int, int], list[str] | None]:
    """Which of the two texts lies along a side of some length; the numbered one where both do."""
    texts = [None if given is None or isinstance(given, str) else list(given) for given in (tokens, query_tokens)]
    lengths = sorted({length for size in sizes for length in size})
    for name, given, text in (("tokens", tokens, texts[0]), ("query_tokens", query_tokens, texts[1])):
        if isinstance(given, str):
            raise TypeError(f"view: {name} is a str, expected a list of str")
        if text is not None and len(text) not in lengths:
            expected = " or ".join(map(str, lengths))
            raise ValueError(f"view: {name} has {len(text)} entries, expected {expected}")

    def text_of(length: int, first: int) -> list[str] | None:
        order = (texts[first], texts[1 - first])
        return next((text for text in order if text is not None and len(text) == length), None)

    return text_of


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


class _Kept:
    """Copies of what calls were given. What several calls have in common is copied once."""

    def __init__(self, device: torch.device | str | None) -> None:
        self._device = device
        self._forward = -1
        self._calls: Counter[str] = Counter()  # of each module, in this forward
        self._keys: dict[tuple[str, int], _Keys] = {}  # by module and its number of the call
        self._options: dict[int, tuple[Tensor, int, Tensor]] = {}  # of this forward: original, version, copy

    def copy(self, x: Tensor) -> Tensor:
        """A copy: a cache or a mask that the next step overwrites does not change what was recorded."""
        return x.detach().to(self._device or x.device, copy=True)

    def option(self, x: Tensor, forward: int) -> Tensor:
        """A copy that all layers share which were given the same tensor, as masks are."""
        self._enter(forward)
        version = 0 if x.is_inference() else x._version
        found = self._options.get(id(x))
        if found is None or found[1] != version:
            found = self._options[id(x)] = (x, version, self.copy(x))
        return found[2]

    def keys(self, name: str, key: Tensor, forward: int) -> Tensor:
        """A copy that shares memory with that of the module's call in the forward before, as far as it has its keys."""
        self._enter(forward)
        number = self._calls[name]
        self._calls[name] += 1
        return self._keys.setdefault((name, number), _Keys()).take(key.detach().to(self._device or key.device))

    def _enter(self, forward: int) -> None:
        if forward != self._forward:
            self._forward = forward
            self._calls.clear()
            self._options.clear()


class _Keys:
    """Keys of one module in one buffer with room for more: a generation of T tokens keeps T keys, not T * T / 2."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None  # (.., room, D)
        self._length = 0

    def take(self, key: Tensor) -> Tensor:
        """The keys (.., Sk, D), as a view of the buffer."""
        before, length = self._length, key.shape[-2]
        if not self._begins(key):
            self._buffer, before = torch.empty_like(key, memory_format=torch.contiguous_format), 0
        assert self._buffer is not None
        if self._buffer.shape[-2] < length:
            grown = key.new_empty((*key.shape[:-2], length + length // 2 + 16, key.shape[-1]))
            grown[..., :before, :] = self._buffer[..., :before, :]
            self._buffer = grown
        self._buffer[..., before:length, :] = key[..., before:, :]
        self._length = length
        return self._buffer[..., :length, :]

    def _begins(self, key: Tensor) -> bool:
        """Whether the key begins with what the buffer holds: no call that views it may see another key."""
        buffer, length = self._buffer, self._length
        if buffer is None or key.shape[-2] < length or (buffer.dtype, buffer.device) != (key.dtype, key.device):
            return False
        if (*buffer.shape[:-2], buffer.shape[-1]) != (*key.shape[:-2], key.shape[-1]):
            return False
        if buffer.is_inference() and not torch.is_inference_mode_enabled():  # torch lets nobody write to it
            return False
        return torch.equal(buffer[..., :length, :], key[..., :length, :])


class _Places:
    """Which module inside the model is running."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._running: list[str] = []
        self._hooks: list[Any] = []
        self._forwards = 0

    def here(self) -> str:
        return self._running[-1] if self._running else ""

    def forward(self) -> int:
        """The number of the outermost call that is running; a call outside of the model has one of its own."""
        if not self._running:
            self._forwards += 1
        return self._forwards

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._entered(name)))
            self._hooks.append(module.register_forward_hook(self._left, always_call=True))

    def _entered(self, name: str) -> None:
        if not self._running:
            self._forwards += 1
        self._running.append(name)

    def _left(self, *_: Any) -> None:
        self._running.pop()

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


class _Functions(TorchFunctionMode):
    """Sees torch's own attention function, whoever calls it."""

    def __init__(self, take: Callable[[Tensor, Tensor, Options], None]) -> None:
        super().__init__()
        self._take = take

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._take(*sdpa.seen(*args, **kwargs))
        return func(*args, **kwargs)


@contextmanager
def _through_headway(model: nn.Module) -> Iterator[None]:
    """Hugging Face's configurations inside the model say attn_implementation="headway" meanwhile."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(getattr(config, "_attn_implementation_internal", None), str):
            configs[id(config)] = config
    if configs:
        register_with_transformers(_REGISTERED)
    before = {number: config._attn_implementation_internal for number, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation_internal = _REGISTERED
        yield
    finally:
        for number, config in configs.items():
            config._attn_implementation_internal = before[number]
