"""The distribution that ./dev bench --random draws from."""

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import draws


@pytest.fixture(params=["gpu", "cpu"], scope="module")
def machine(request):
    return request.param


@pytest.fixture(scope="module")
def some(machine):
    return [draws.draw(machine, 11, index) for index in range(1000)]


def test_a_text_names_its_case(some):
    assert all(draws.parse(str(draw)) == draw for draw in some)


def test_a_seed_repeats_its_cases_and_another_does_not(machine, some):
    assert draws.draw(machine, 11, 7) == some[7] != draws.draw(machine, 12, 7)


def test_every_kind_is_drawn_about_as_often(some):
    counts = Counter(draw.kind for draw in some)
    assert set(counts) == set(draws.KINDS) and min(counts.values()) > 100


def test_half_of_the_heads_are_64_or_128_wide(some):
    assert 0.45 < sum(draw.width in (64, 128) for draw in some) / len(some) < 0.58


def test_cases_fit_the_machine(machine, some):
    limits = draws.LIMITS[machine]
    assert all(draw.flops <= limits.flops and draw.numbers <= limits.numbers for draw in some)
    assert all(draw.heads % draw.kv_heads == 0 for draw in some)
    assert all(draw.queries <= draw.keys for draw in some if draw.causal)
