"""The documents' listings that ./dev demo times."""

import runpy

import pytest

from pages import ROOT


@pytest.mark.parametrize("document, needs", [("000", "numpy"), ("001", "torch"), ("003", "numpy"), ("004", "flax")])
def test_a_listing_that_the_demo_times_runs(document, needs):
    pytest.importorskip(needs, reason=f"{needs} is not installed")
    listings = runpy.run_path(str(ROOT / "examples/python/documents.py"))
    small, _ = listings[f"document_{document}"]()
    result = small()
    output = result[0] if isinstance(result, tuple) else result
    assert tuple(output.shape) == {"000": (2, 64, 64), "001": (2, 6, 32)}.get(document, (2, 4, 100))
