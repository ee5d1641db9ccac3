"""Trains a small language model twice, once with torch's attention and once with Headway's, and compares the losses.

    python examples/python/train_gpt.py --steps 300 --plot train_gpt.png

The text is the repository's LICENSE unless --text names another file. Both runs begin with the same parameters and see
the same batches; the only difference is the function that computes attention. train_gpt_cuda.py does the same with a
larger model on a GPU.
"""

from __future__ import annotations

import argparse
import pathlib
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headway.torch


class Sizes(NamedTuple):
    """What a model and its batches are like."""

    length: int = 64
    batch: int = 8
    width: int = 64
    heads: int = 4
    layers: int = 2


SMALL = Sizes()
LICENSE = pathlib.Path(__file__).resolve().parents[2] / "LICENSE"


class Block(nn.Module):
    """One layer of a transformer: causal attention, then a small network, each added to its input."""

    def __init__(self, attention, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.attention, self.heads = attention, (3, sizes.heads, width // sizes.heads)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same."""
        split = self.qkv(self.norm1(x)).unflatten(-1, self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width / heads)
        heads = self.attention(query, key, value, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.network(self.norm2(x))


class Gpt(nn.Module):
    """Characters in, scores for the next character out."""

    def __init__(self, characters: int, attention, sizes: Sizes = SMALL) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(characters, sizes.width), nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.Sequential(*(Block(attention, sizes) for _ in range(sizes.layers)))
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, characters)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length) -> (batch, length, characters)."""
        x = self.tokens(x) + self.places.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def train(attention, text: str, steps: int) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    alphabet = sorted(set(text))
    data = torch.tensor([alphabet.index(character) for character in text])
    model = Gpt(len(alphabet), attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(data) - SMALL.length - 1, (SMALL.batch,)).tolist()
        batch = torch.stack([data[start : start + SMALL.length + 1] for start in starts])
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def plot(curves: dict[str, list[float]], path: str) -> None:
    """Both curves in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=(7, 4))
    for style, (name, losses) in zip(("-", "--"), curves.items()):
        axes.plot(losses, style, label=name)
    axes.set(xlabel="step", ylabel="loss (nats per character)", title="The same training with two attentions")
    axes.legend()
    plt.savefig(path, dpi=120, bbox_inches="tight")
    plt.close()


def main() -> None:
    """Reads the command line, trains twice, compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--text", default=str(LICENSE))
    parser.add_argument("--plot", metavar="FILE", help="write a picture of both curves (needs matplotlib)")
    options = parser.parse_args()

    text = pathlib.Path(options.text).read_text()
    curves = {}
    for name, attention in (
        ("torch", F.scaled_dot_product_attention),
        ("headway", headway.torch.scaled_dot_product_attention),
    ):
        begin = time.perf_counter()
        curves[name] = train(attention, text, options.steps)
        first, last = curves[name][0], curves[name][-1]
        print(f"{name:8} loss {first:.3f} -> {last:.3f} in {time.perf_counter() - begin:.1f} s")
    difference = max(abs(one - other) for one, other in zip(*curves.values()))
    print(f"largest difference between the two curves: {difference:.5f}")
    if options.plot:
        plot(curves, options.plot)
        print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
