"""headway.torch.distributed with 1 to 4 ranks under gloo, against the oracle; the ranks run torch_ranks.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cases import check_examples
from pages import programs_of

pytest.importorskip("torch.distributed")

FOLDER = Path(__file__).parent
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run(*command, timeout=120):
    done = subprocess.run(
        [sys.executable, *command], cwd=FOLDER, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "parts",
    [
        # one import of torch
        ("pairs=1", "pairs=2", "pairs=3", "pairs=4", "all=2", "all=3", "mesh=4", "killed=3", "stopped=3"),
        pytest.param(("all=1", "all=4"), marks=pytest.mark.slow),
    ],
    ids=["some", "the others"],
)
def test_one_to_four_ranks_compute_what_one_process_does_name_what_differs_and_notice_a_killed_rank(parts):
    run("torch_ranks.py", *parts)


@pytest.mark.slow  # three imports of torch; the ranks above compute the same gradients
def test_torchrun_trains_on_a_split_sequence_with_the_losses_of_one_process():
    printed = run(*TORCHRUN, str(FOLDER.parents[1] / "examples/python/train_gpt_split.py"), "--steps", "5")
    [difference] = re.findall(r"largest difference between the two curves: ([0-9.]+)", printed)
    assert float(difference) <= 1e-4


def test_the_programs_of_the_page_run_under_torchrun(tmp_path):
    program = "\n".join(program for program, _ in programs_of("docs/distributed.md")).replace("16384", "64")
    (tmp_path / "page.py").write_text(program)
    assert run(*TORCHRUN, str(tmp_path / "page.py")).count("distributed attention") == 2


def test_the_examples_of_the_docstrings_run(monkeypatch):
    import headway.torch.distributed as split

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name in ("attention", "Attention", "LostRank"):  # test_distributed.py runs those of take and join
        check_examples(getattr(split, name))
