"""Typical use as a distribution, from which `./dev bench gpu --random` and `./dev bench cpu --random` draw their cases.

Each kind of work is drawn as often as the others:

    training         causal self-attention, forward and backward; sometimes with a bias, a mask of documents or dropout
    prefill          causal self-attention, forward
    chunked_prefill  a chunk of queries after the keys of earlier chunks, forward
    decode           1 to 5 queries after many keys, forward; a third of the batches in a padded cache
    encoder          padded self-attention, forward and backward; sometimes with a bias or dropout
    vision           an image's patches or a window's, forward and backward; windows with a bias
    cross_attention  queries and keys of two sequences, forward and backward; sometimes padded

Lengths are log-uniform from 2^7 to 2^14, 60 % of them multiples of 64; encoders, images, decode and half of the second
sequences have lengths of their own. One draw in twenty is tiny: up to 64 tokens. There are 4 to 40 heads of width 32 to
256 (half of them 64 or 128), grouped by 2, 4 or 8, or over one key head, in most decoders and few of the others. Memory
is [B, H, S, D] or [B, S, H, D]. The batch is log-uniform up to what fits the machine's limits; a draw that is over them
with a batch of one is drawn again. Nobody chose these cases: a seed that was never looked at cannot be tuned to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

KINDS = ("training", "prefill", "chunked_prefill", "decode", "encoder", "vision", "cross_attention")
TRAINED = ("training", "encoder", "vision", "cross_attention")  # kinds that are timed backward too
DECODERS = ("training", "prefill", "chunked_prefill", "decode")
HEADS = (4, 6, 8, 12, 16, 20, 24, 32, 40)
OTHER_WIDTHS = (32, 40, 48, 72, 80, 96, 112, 160, 192, 256)  # beside 64 and 128
IMAGES = (49, 64, 144, 196, 197, 256, 257, 577, 729, 1024, 1025, 1370, 4096)  # patches, with a class token or without
PROMPTS = (77, 128, 226, 256, 512, 1500)  # text encoders' and audio encoders' lengths


@dataclass(frozen=True)
class Limits:
    """What a machine's cases may cost, and how often its users take each type."""

    flops: float  # of one forward call
    numbers: float  # in query, key and value
    types: dict[str, int]  # weights


LIMITS = {
    "gpu": Limits(flops=2.0**42, numbers=2.0**29, types={"bf16": 60, "f16": 25, "f32": 15}),
    "cpu": Limits(flops=2.0**33, numbers=2.0**26, types={"f32": 60, "bf16": 30, "f16": 10}),
}


@dataclass(frozen=True)
class Draw:
    """One case. Its text says everything about it, and `--case TEXT` runs it again."""

    kind: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    dtype: str
    causal: str = ""  # "", "causal", or "bottom_right": the last query sees the last key
    mask: str = ""  # "", "padding", "documents" or "bias"
    dropout: float = 0.0
    layout: str = "bhsd"

    @property
    def trained(self) -> bool:
        return self.kind in TRAINED

    @property
    def pairs(self) -> float:
        """Of one head: what the causal rule leaves."""
        if self.causal == "causal":
            return self.queries * (self.queries + 1) / 2
        if self.causal == "bottom_right":
            return self.queries * (self.keys - (self.queries - 1) / 2)
        return float(self.queries) * self.keys

    @property
    def flops(self) -> float:
        """Of a forward call."""
        return 4.0 * self.batch * self.heads * self.width * self.pairs

    @property
    def numbers(self) -> float:
        per_width = self.heads * self.queries + 2 * self.kv_heads * self.keys
        return float(self.batch) * self.width * per_width + self.mask_numbers

    @property
    def mask_numbers(self) -> float:
        if self.mask == "padding":
            return float(self.batch) * self.keys * (self.queries if self.causal else 1)
        if self.mask == "bias":
            return float(self.heads) * self.queries * self.keys
        return float(self.queries) * self.keys if self.mask == "documents" else 0.0

    def __str__(self) -> str:
        words = [self.kind, f"b{self.batch}", f"h{self.heads}/{self.kv_heads}", f"q{self.queries}", f"k{self.keys}"]
        words += [f"d{self.width}", self.dtype, self.causal, self.mask, self.layout]
        words.append(f"dropout{self.dropout}" if self.dropout else "")
        return " ".join(word for word in words if word)


def parse(text: str) -> Draw:
    """The draw that a text names, its words in the order of str(draw) or any other."""
    found: dict[str, object] = {}
    for word in text.split():
        if word in KINDS:
            found["kind"] = word
        elif word in LIMITS["gpu"].types:
            found["dtype"] = word
        elif word in ("causal", "bottom_right"):
            found["causal"] = word
        elif word in ("padding", "documents", "bias"):
            found["mask"] = word
        elif word in ("bhsd", "bshd"):
            found["layout"] = word
        elif word.startswith("dropout"):
            found["dropout"] = float(word.removeprefix("dropout"))
        elif word.startswith("h"):
            heads, _, kv_heads = word[1:].partition("/")
            found["heads"], found["kv_heads"] = int(heads), int(kv_heads or heads)
        else:
            name = {"b": "batch", "q": "queries", "k": "keys", "d": "width"}[word[0]]
            found[name] = int(word[1:])
    return Draw(**found)  # type: ignore[arg-type]


def draw(machine: str, seed: int, index: int) -> Draw:
    """Case `index` of a seed; machine is "gpu" or "cpu"."""
    limits = LIMITS[machine]
    random = Random(f"{machine} {seed} {index}")
    kind = random.choice(KINDS)
    while True:
        one = _one(random, kind, limits)
        fits = min(limits.flops / one.flops, limits.numbers / max(one.numbers, 1.0), 1024.0)
        if fits >= 1.0:
            batch = int(math.exp(random.uniform(0.0, math.log(fits + 1.0))))
            return Draw(**(vars(one) | {"batch": max(1, min(batch, int(fits)))}))


def _one(random: Random, kind: str, limits: Limits) -> Draw:
    """A draw with a batch of one."""
    queries, keys = _lengths(random, kind)
    heads, kv_heads = _heads(random, kind)
    causal = ""
    if kind in DECODERS:
        causal = "causal" if queries == keys else "bottom_right" if queries > 1 else ""
    mask, dropout = _options(random, kind)
    return Draw(
        kind=kind,
        batch=1,
        heads=heads,
        kv_heads=kv_heads,
        queries=queries,
        keys=keys,
        width=random.choice((64, 128)) if random.random() < 0.5 else random.choice(OTHER_WIDTHS),
        dtype=random.choices(list(limits.types), list(limits.types.values()))[0],
        causal=causal,
        mask=mask,
        dropout=dropout,
        layout=random.choice(("bhsd", "bshd")),
    )


def _length(random: Random, least: int = 7, most: int = 14) -> int:
    length = round(2.0 ** random.uniform(least, most))
    return max(64, round(length / 64) * 64) if random.random() < 0.6 else length


def _lengths(random: Random, kind: str) -> tuple[int, int]:
    """Queries and keys."""
    if random.random() < 0.05:
        keys = random.randint(2, 64)
        return (random.randint(1, min(5, keys)) if kind == "decode" else keys), keys
    if kind == "decode":
        keys = _length(random)
        return random.choice((1, 1, 1, 2, 3, 4, 5)), keys
    if kind == "chunked_prefill":
        queries = _length(random, 7, 11)
        return queries, queries + _length(random)
    if kind == "encoder":
        length = _length(random, 4, 9)
        return length, length
    if kind == "vision":
        length = random.choice(IMAGES)
        return length, length
    if kind == "cross_attention":
        return _length(random), (_length(random) if random.random() < 0.5 else random.choice(PROMPTS))
    length = _length(random)
    return length, length


def _heads(random: Random, kind: str) -> tuple[int, int]:
    """Heads of queries and of keys."""
    heads = random.choice(HEADS)
    if random.random() < 0.08:
        return heads, 1
    group = random.choice((2, 4, 8)) if random.random() < (0.6 if kind in DECODERS else 0.1) else 1
    return heads, heads // group if heads % group == 0 else heads


def _options(random: Random, kind: str) -> tuple[str, float]:
    """What is masked beside the causal rule, and dropout."""
    chance, dropout = random.random(), 0.1 if random.random() < 0.15 else 0.0
    if kind == "training":
        return ("bias" if chance < 0.1 else "documents" if chance < 0.2 else ""), dropout
    if kind == "decode":
        return ("padding" if chance < 0.33 else ""), 0.0
    if kind == "encoder":
        return ("bias" if chance < 0.2 else "padding"), dropout
    if kind == "vision":
        return ("bias" if chance < 0.25 else ""), 0.0
    if kind == "cross_attention":
        return ("padding" if chance < 0.3 else ""), 0.0
    return "", 0.0
