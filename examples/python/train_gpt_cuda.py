"""Trains a language model on a GPU twice, with torch's attention and with Headway's: losses and tokens per second.

    python examples/python/train_gpt_cuda.py --steps 200 --plot train_gpt_cuda.png

The model is train_gpt.py's, larger and under bf16 autocast; the text is the repository's LICENSE. Both begin with the
same parameters and see the same batches. They take turns every few steps, so that a card that slows down as it warms up
slows both. It needs a CUDA build of torch, a GPU, and a Headway that was built with its CUDA engine.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from train_gpt import LICENSE, Gpt, Sizes

import headway
import headway.torch

LARGE = Sizes(length=2048, batch=8, width=1024, heads=8, layers=8)
TURN = 10  # steps between two turns


def missing() -> str | None:
    """What this machine lacks; None where everything is there."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device: this needs a GPU and a CUDA build of torch"
    if "cuda" not in headway.engines():
        return "headway was built without its CUDA engine: build it where nvcc is, with -DHEADWAY_CUDA=ON"
    return None


class Run:
    """One training: a model, its optimizer, its losses and the time that its steps took."""

    def __init__(self, attention: Any, data: Any, characters: int, sizes: Sizes, steps: int) -> None:
        torch.manual_seed(0)
        self.model = Gpt(characters, attention, sizes).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        starts = torch.randint(len(data) - sizes.length - 1, (steps, sizes.batch, 1))
        self.places = (starts + torch.arange(sizes.length + 1)).cuda()  # of every batch's characters
        self.data, self.losses, self.milliseconds = data, [], []

    def steps(self, first: int, last: int) -> None:
        """Trains on some of the batches."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for places in self.places[first:last]:
            batch = self.data[places]
            with torch.autocast("cuda", dtype=torch.bfloat16):
                scores = self.model(batch[:, :-1])
            loss = F.cross_entropy(scores.float().flatten(0, 1), batch[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.detach())
        end.record()
        end.synchronize()
        self.milliseconds.append(begin.elapsed_time(end) / (last - first))


def train(text: str, sizes: Sizes, steps: int) -> dict[str, Any]:
    """The record of both trainings: losses by step, tokens per second."""
    alphabet = sorted(set(text))
    data = torch.tensor([alphabet.index(character) for character in text]).cuda()
    contenders = {
        "torch": F.scaled_dot_product_attention,
        "headway": headway.torch.scaled_dot_product_attention,
    }
    runs = {name: Run(attention, data, len(alphabet), sizes, steps) for name, attention in contenders.items()}
    for first in range(0, steps, TURN):
        for run in runs.values():
            run.steps(first, min(first + TURN, steps))
    tokens = 1e3 * sizes.batch * sizes.length
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "sizes": sizes._asdict(),
        "losses": {name: torch.stack(run.losses).tolist() for name, run in runs.items()},
        # The first turn warms up.
        "tokens_per_second": {
            name: tokens / statistics.median(run.milliseconds[1:] or run.milliseconds) for name, run in runs.items()
        },
    }


def plot(record: dict[str, Any], path: str) -> None:
    """Both curves, and both speeds, in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curves, bars) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 1))
    for style, (name, losses) in zip(("-", "--"), record["losses"].items()):
        curves.plot(losses, style, label=name)
    sizes = Sizes(**record["sizes"])
    about = f"{sizes.layers} layers, width {sizes.width}, {sizes.heads} heads, length {sizes.length}, bf16"
    figure.suptitle(f"{record['device']}, torch {record['torch']}: {about}")
    curves.set(xlabel="step", ylabel="loss (nats per character)")
    curves.legend()
    speeds = {name: speed / 1e3 for name, speed in record["tokens_per_second"].items()}
    bars.bar_label(bars.bar(list(speeds), list(speeds.values()), color=["C0", "C1"]), fmt="%.0f")
    bars.set(ylabel="thousand tokens per second")
    plt.tight_layout()
    plt.savefig(path, dpi=110)
    plt.close()


def main() -> None:
    """Reads the command line, trains twice, compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--text", default=str(LICENSE))
    parser.add_argument("--json", metavar="FILE", help="write losses and speeds")
    parser.add_argument("--plot", metavar="FILE", help="write a picture of them (needs matplotlib)")
    options = parser.parse_args()
    if reason := missing():
        raise SystemExit(reason)

    record = train(pathlib.Path(options.text).read_text(), LARGE, options.steps)
    print(f"{record['device']}, torch {record['torch']}")
    for name, losses in record["losses"].items():
        speed = record["tokens_per_second"][name]
        print(f"{name:8} loss {losses[0]:.3f} -> {losses[-1]:.3f}, {speed:,.0f} tokens per second")
    difference = max(abs(one - other) for one, other in zip(*record["losses"].values()))
    speeds = record["tokens_per_second"]
    print(
        f"largest difference between the two curves: {difference:.4f}; speed {speeds['headway'] / speeds['torch']:.3f}x"
    )
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(record) + "\n")
    if options.plot:
        plot(record, options.plot)
        print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
