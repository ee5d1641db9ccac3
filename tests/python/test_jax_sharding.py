"""headway.jax on sharded arrays: computed where they lie, in a process that asks for several host devices."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")


# Against the oracle, with gradients; and bit for bit against one device.
@pytest.mark.parametrize("checks", ["jax_sharded.py", "jax_sharding.py"])
def test_sharded_batches_and_heads_are_computed_where_they_lie(checks):
    folder = Path(__file__).parent
    done = subprocess.run([sys.executable, checks], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
