"""Trains a small model on packed documents of random length, each a question that is seen whole and an answer.

    python examples/python/train_packed.py --steps 200

A document is a question of random letters, a mark, and the same letters backwards. Many of them lie in one sequence,
and no padding is computed. The mask says who sees whom: the letters of a question see each other in both directions (a
prefix), an answer sees what is before it, and no document sees another. It is made anew for each batch, from two arrays
of ids, and all layers share it.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headway.torch
from headway import masks

LETTERS, MARK = 8, 8
LENGTH, LONGEST, WIDTH, HEADS, LAYERS = 256, 9, 64, 4, 2


class Pack(NamedTuple):
    """Documents one after the other, each array (length,)."""

    tokens: Tensor
    documents: Tensor  # the number of a token's document; -1 where no document fits any more
    questions: Tensor  # the same for the tokens of questions, -1 for those of answers
    places: Tensor  # positions inside of the document


def draw_pack(generator: torch.Generator) -> Pack:
    """Fills a sequence with documents of random length."""
    columns: list[Tensor] = []
    filled, number = 0, 0
    while True:
        count = int(torch.randint(2, LONGEST, (), generator=generator))
        letters = torch.randint(LETTERS, (count,), generator=generator)
        tokens = torch.cat([letters, torch.tensor([MARK]), letters.flip(0)])
        if filled + len(tokens) > LENGTH:
            break
        document = torch.full_like(tokens, number)
        question = torch.where(torch.arange(len(tokens)) <= count, document, -1)
        columns.append(torch.stack([tokens, document, question, torch.arange(len(tokens))]))
        filled, number = filled + len(tokens), number + 1
    rest = torch.tensor([[MARK], [-1], [-1], [0]]).expand(4, LENGTH - filled)
    return Pack(*torch.cat([*columns, rest], dim=1))


def mask_of(packs: list[Pack]) -> masks.Mask:
    """Causal inside of a document, and both ways inside of its question."""
    documents = masks.documents(torch.stack([pack.documents for pack in packs]))
    questions = masks.documents(torch.stack([pack.questions for pack in packs]))
    return documents & masks.causal() | questions


class Layer(nn.Module):
    """Attention, then a small network, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: masks.Mask | Tensor) -> Tensor:
        """(batch, length, width) -> the same."""
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(2)
        heads = headway.torch.attention(query, key, value, mask=mask, layout="bshd")
        x = x + self.out(heads.flatten(2))
        return x + self.network(self.norm2(x))


class Model(nn.Module):
    """Tokens and their places in, scores for the next token out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(LETTERS + 1, WIDTH), nn.Embedding(2 * LONGEST + 1, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, LETTERS + 1)

    def forward(self, tokens: Tensor, places: Tensor, mask: masks.Mask | Tensor) -> Tensor:
        """(batch, length) -> (batch, length, letters)."""
        x = self.tokens(tokens) + self.places(places)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def train(steps: int, batch: int = 4, as_bools: bool = False) -> list[float]:
    """The loss of every step, over the answers' letters. as_bools stores the masks as (length, length) bools."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        packs = [draw_pack(generator) for _ in range(batch)]
        tokens, documents, questions, places = (torch.stack(columns) for columns in zip(*packs))
        mask: masks.Mask | Tensor = mask_of(packs)
        if as_bools:
            mask = torch.from_numpy(mask.to_bool(LENGTH, LENGTH))
        scores = model(tokens, places, mask)
        # What follows the mark, up to the document's end.
        is_answer = (questions[:, 1:] == -1) & (documents[:, 1:] >= 0)
        loss = F.cross_entropy(scores[:, :-1][is_answer], tokens[:, 1:][is_answer])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Reads the command line, shows a mask, trains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    pack = draw_pack(torch.Generator().manual_seed(1))
    mask = mask_of([pack])
    print(mask.draw(LENGTH, LENGTH))
    begin = time.perf_counter()
    losses = train(options.steps)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
