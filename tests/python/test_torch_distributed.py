"""headway.torch.distributed with 1 to 4 ranks under gloo, against the oracle; the ranks run torch_ranks.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed")

FOLDER = Path(__file__).parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run(*command, timeout=120):
    done = subprocess.run(
        [sys.executable, *command], cwd=FOLDER, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_to_four_ranks_compute_what_one_process_does_and_name_what_differs():
    run("torch_ranks.py", "all", "1", "2", "3", "4")


def test_a_killed_rank_is_an_exception_on_the_others():
    run("torch_ranks.py", "killed", "3")


def test_torchrun_starts_ranks():
    run(
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        "2",
        "torch_ranks.py",
        "launched",
    )
