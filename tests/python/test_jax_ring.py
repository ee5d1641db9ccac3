"""headway.jax.ring_attention on several host devices, against the oracle, in a process that asks for them."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")


def test_rings_of_one_to_four_devices_compute_what_one_does():
    folder = Path(__file__).parent
    done = subprocess.run([sys.executable, "jax_devices.py"], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
