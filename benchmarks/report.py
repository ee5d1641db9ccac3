"""The benchmark's output: lines while it runs; JSON, a plot and Markdown tables at the end."""

from __future__ import annotations

import datetime
import json
import platform
from pathlib import Path
from typing import Any

_NAMES = {"torch": "PyTorch", "onnxruntime": "ONNX Runtime", "jax": "JAX", "openblas": "OpenBLAS", "onednn": "oneDNN"}

# The rows of the plot: what people ask for first.
_HEADLINES = [
    ("f32 forward, B1 H8", "S2048 D64"),
    ("f32 forward, B1 H8", "S2048 D64 causal"),
    ("f32 forward, B1 H8", "S8192 D128"),
    ("f32 backward, B1 H8", "S2048 D64"),
    ("f32 backward, B1 H8", "S2048 D64 causal"),
    ("bf16 forward, B1 H8", "S2048 D64"),
    ("bf16 forward, B1 H8", "S2048 D128 causal"),
    ("bf16 backward, B1 H8", "S2048 D64"),
    ("f32 forward S2048 D64 with an option, B1 H8", "mask"),
    ("f32 forward S2048 D64 with an option, B1 H8", "dropout"),
    ("many small problems, f32", "B32 H8 S64 D64 forward"),
    ("decode: one query, 8192 keys, D128", "f32 32 heads"),
    ("decode: one query, 8192 keys, D128", "bf16 32 heads, 8 of keys"),
    ("the layer, f32", "d512 h8 B4 S512"),
    ("the layer, f32", "d1024 h16 B1 S2048 with weights"),
]
# And of those, the rows of the README.
_README_ROWS = [
    ("f32 forward, B1 H8", "S2048 D64"),
    ("f32 backward, B1 H8", "S2048 D64 causal"),
    ("bf16 forward, B1 H8", "S2048 D128 causal"),
    ("decode: one query, 8192 keys, D128", "f32 32 heads"),
    ("the layer, f32", "d512 h8 B4 S512"),
]


def _unit(result: dict[str, Any]) -> str:
    return "GB/s" if result["peak"] == "read" else "GFLOP/s"


def _peers(result: dict[str, Any]) -> str:
    found = (f"{_NAMES[who]} {rate / 1e9:.0f}" for who, rate in result["rates"].items() if who != "headway")
    return ", ".join(found)


def print_machine(machine: dict[str, Any]) -> None:
    peaks = {name: value / 1e9 for name, value in machine["peaks"].items()}
    print(
        f"\n{machine['suite']}, {machine['threads']} thread(s): peak f32 {peaks['f32']:.0f}, AVX2 {peaks['avx2']:.0f}, "
        f"bf16 {peaks['bf16']:.0f} GFLOP/s",
        flush=True,
    )


def print_result(result: dict[str, Any], *, first: bool) -> None:
    if first:
        print(f"\n  {result['group']}")
    if "share" not in result:
        print(f"    {result['name']:34} the machine was held back in every sample")
        return
    ratio = f"{result['ratio']:5.2f}x {_NAMES[result['best_peer']]}" if result["ratio"] else ""
    rate = result["rates"]["headway"] / 1e9
    print(f"    {result['name']:34} {rate:7.1f} {_unit(result):8} {100 * result['share']:5.1f} %  {ratio}", flush=True)


def _row(result: dict[str, Any], *, with_group: bool) -> str:
    name = f"{result['group']}: {result['name']}" if with_group else result["name"]
    ratio = f"{result['ratio']:.2f}x" if result.get("ratio") else ""
    ours = f"{result['rates']['headway'] / 1e9:.0f} {_unit(result)}"
    share = f"{100 * result['share']:.0f} %"
    if result["peak"] == "read":
        share += f" of {result['peak_rate'] / 1e9:.0f}"
    return f"| {name} | {ours} | {share} | {_peers(result)} | {ratio} |"


def _rows_of(results: list[dict[str, Any]], wanted: list[tuple[str, str]]) -> list[dict[str, Any]]:
    most = max(result["threads"] for result in results)
    found = {(r["group"], r["name"]): r for r in results if r["threads"] == most and "share" in r}
    return [found[key] for key in wanted if key in found]


_HEAD = "| | Headway | of the peak | peers | to the best |\n|---|---|---|---|---|\n"


def _machine_text(machines: list[dict[str, Any]]) -> str:
    about = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in about if "model name" in line), platform.processor())
    versions = machines[0]["versions"]
    peaks = [
        f"{m['threads']} thread{'s' if m['threads'] > 1 else ''}: f32 {m['peaks']['f32'] / 1e9:.0f}, bf16 "
        f"{m['peaks']['bf16'] / 1e9:.0f} GFLOP/s"
        for m in machines
        if m["suite"] == "all"
    ]
    return (
        f"{datetime.date.today()}, {model}, PyTorch {versions['torch']}, ONNX Runtime {versions['onnxruntime']}, JAX "
        f"{versions['jax']}. Peaks measured in the run: {'; '.join(peaks)}."
    )


def put_between(path: Path, benchmark: str, text: str) -> None:
    """Puts the text between the file's two marks of a benchmark."""
    begin, end = f"<!-- benchmark {benchmark}: begin -->\n", f"<!-- benchmark {benchmark}: end -->"
    before, rest = path.read_text().split(begin)
    _, after = rest.split(end)
    path.write_text(before + begin + text + end + after)


def _tables(results: list[dict[str, Any]]) -> str:
    text = ""
    for suite in ("all", "avx2"):
        for threads in sorted({r["threads"] for r in results}, reverse=True):
            rows = [r for r in results if r["suite"] == suite and r["threads"] == threads and "share" in r]
            for group in dict.fromkeys(r["group"] for r in rows):
                text += f"### {group}; {threads} thread{'s' if threads > 1 else ''}\n\n{_HEAD}"
                text += "\n".join(_row(r, with_group=False) for r in rows if r["group"] == group) + "\n\n"
    growth = [r for r in results if r["suite"] == "growth" and "share" in r]
    if growth:
        text += "### Growth: f32 forward, D64\n\n"
        text += "| | GFLOP/s | of the peak | memory that the case added |\n|---|---|---|---|\n"
        for r in growth:
            rate = f"{r['rates']['headway'] / 1e9:.0f}"
            text += f"| {r['name']} | {rate} | {100 * r['share']:.0f} % | {r['grown_kib'] / 1024:.0f} MiB |\n"
        text += "\n"
    return text


def _plot(path: Path, results: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in _rows_of(results, _HEADLINES) if r["peak"] != "read"][::-1]
    colours = {"headway": "#1f6feb", "torch": "#ee7b51", "onnxruntime": "#8b949e", "jax": "#7cb987"}
    figure, axes = plt.subplots(figsize=(9, 0.62 * len(rows) + 1.2))
    height = 0.2
    for line, result in enumerate(rows):
        scale = result["rates"]["headway"] / result["share"]
        for place, (who, colour) in enumerate(colours.items()):
            if who in result["rates"]:
                share = 100 * result["rates"][who] / scale
                label = "Headway" if who == "headway" else _NAMES[who]
                if label in axes.get_legend_handles_labels()[1]:
                    label = ""
                y = line + (1.5 - place) * height
                axes.barh(y, share, height, color=colour, label=label or None)
                axes.text(share + 0.7, y, f"{share:.0f}", va="center", fontsize=7)
    axes.axvline(100, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{r['group'].split(',')[0]}\n{r['name']}" for r in rows], fontsize=7)
    axes.set_xlabel("% of the peak of this machine's arithmetic, measured in the same run")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(colours), frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write(folder: Path, machines: list[dict[str, Any]], results: list[dict[str, Any]]) -> None:
    """benchmarks/results/cpu.{json,png}, and the marked parts of README.md and docs/benchmarks.md."""
    where = folder / "results"
    where.mkdir(exist_ok=True)
    data: dict[str, Any] = {"date": str(datetime.date.today()), "machine": _machine_text(machines)}
    data |= {"runs": machines, "results": results}
    (where / "cpu.json").write_text(json.dumps(data, indent=1) + "\n")
    _plot(where / "cpu.png", results)
    most = max(result["threads"] for result in results)
    rows = "\n".join(_row(r, with_group=True) for r in _rows_of(results, _README_ROWS))
    said = f"{most} threads; {_machine_text(machines)}\n\n"
    put_between(folder.parent / "README.md", "cpu", said + _HEAD + rows + "\n")
    put_between(folder.parent / "docs/benchmarks.md", "cpu", _machine_text(machines) + "\n\n" + _tables(results))
    print(f"\nwritten: {where}/cpu.json, {where}/cpu.png, README.md, docs/benchmarks.md")
