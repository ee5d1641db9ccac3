"""Trains a small language model on sequences that are split over ranks, and compares the losses with one process's.

    torchrun --standalone --nproc-per-node 2 examples/python/train_gpt_split.py --steps 100

The model is train_gpt.py's. Every rank has all parameters and, by a zigzag sharding, its part of every sequence; ranks
meet in attention, and once a step to add up gradients. Rank 0 then trains alone on the whole sequences.
"""

from __future__ import annotations

import argparse
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from train_gpt import LICENSE, SMALL, Gpt

import headway.distributed as shards
import headway.torch
import headway.torch.distributed as context_parallel


class SplitGpt(Gpt):
    """A Gpt that is given some rows of a sequence, and their places in it."""

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """(batch, rows), (rows,) -> (batch, rows, characters)."""
        x = self.tokens(x) + self.places.weight[places]
        return self.head(self.norm(self.blocks(x)))


def train(text: str, steps: int, sharding: shards.Sharding, rank: int) -> list[float]:
    """The loss of every step over the whole sequences; of one rank alone, or of all of them together."""
    torch.manual_seed(0)
    alphabet = sorted(set(text))
    data = torch.tensor([alphabet.index(character) for character in text])
    split = sharding.ranks > 1

    def attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        if split:
            return context_parallel.attention(query, key, value, causal=is_causal, sharding=sharding)
        return headway.torch.attention(query, key, value, causal=is_causal)

    model = SplitGpt(len(alphabet), attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    mine = functools.partial(shards.take, rows=sharding.queries[rank])
    places = mine(torch.arange(SMALL.length), axis=0)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(data) - SMALL.length - 1, (SMALL.batch,)).tolist()
        batch = torch.stack([data[start : start + SMALL.length + 1] for start in starts])
        inputs, targets = mine(batch[:, :-1], axis=1), mine(batch[:, 1:], axis=1)
        loss = F.cross_entropy(model(inputs, places).flatten(0, 1), targets.flatten(), reduction="sum")
        loss = loss / (SMALL.batch * SMALL.length)  # a rank's share of the mean
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        if split:
            for numbers in (total, *(parameter.grad for parameter in model.parameters())):
                dist.all_reduce(numbers)
        optimizer.step()
        losses.append(total.item())
    return losses


def main() -> None:
    """Trains on all ranks, then on one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text = LICENSE.read_text()
    together = train(text, options.steps, shards.zigzag(SMALL.length, ranks=ranks), rank)
    if rank == 0:
        alone = train(text, options.steps, shards.contiguous(SMALL.length, ranks=1), 0)
        difference = max(abs(one - other) for one, other in zip(together, alone, strict=True))
        print(f"{ranks} ranks   loss {together[0]:.3f} -> {together[-1]:.3f}")
        print(f"one       loss {alone[0]:.3f} -> {alone[-1]:.3f}")
        print(f"largest difference between the two curves: {difference:.5f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
