"""Figures for reports."""

import sys

import numpy as np
import pytest

import headway

RANDOM = np.random.default_rng(7)


@pytest.fixture
def pyplot():
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def test_every_head_is_a_map_with_its_name(pyplot, tmp_path):
    x = RANDOM.standard_normal((2, 3, 40, 8))
    found = headway.analyze(x, x, causal=True, cells=10)
    figure = headway.plot_heads(found, value="max", scale="linear")
    shown = [ax for ax in figure.axes if ax.images]
    assert len(shown) == 6
    assert shown[4].get_title().startswith("item 1, head 1  entropy ")
    np.testing.assert_array_equal(shown[4].images[0].get_array(), found.map_max[1, 1])
    x[0, 0, 5] = np.nan
    headway.plot_heads(headway.analyze(x, x))
    figure.savefig(tmp_path / "heads.png")
    assert (tmp_path / "heads.png").stat().st_size > 10_000


def test_layers_are_rows(pyplot):
    layers = [headway.analyze(x, x) for x in RANDOM.standard_normal((3, 1, 2, 20, 4))]
    figure = headway.plot_heads(layers)
    shown = [ax for ax in figure.axes if ax.images]
    assert [ax.get_title() for ax in shown][-1] == "layer 2, head 1"
    grid = shown[0].get_gridspec()
    assert (grid.nrows, grid.ncols) == (3, 2)
    named = headway.plot_heads(layers[0], titles=["one", "two"])
    assert [ax.get_title() for ax in named.axes][:2] == ["one", "two"]


def test_a_row_is_its_exact_weights(pyplot):
    q, k = RANDOM.standard_normal((1, 2, 6, 8)), RANDOM.standard_normal((1, 2, 6, 8))
    p = headway.attention_scores(q, k, window=(2, 1))[0, 1, 3]
    tokens = ["a", "b", "$x$", "line\nbreak", "e" * 50, "f"]
    ax = headway.plot_row(q, k, 3, head=1, tokens=tokens, window=(2, 1))
    np.testing.assert_allclose([bar.get_height() for bar in ax.patches], p, atol=1e-12)
    ax.figure.canvas.draw()
    assert ax.get_title() == "row 3, 'line⏎break', head 1"
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert labels[2:4] == [r"\$x\$", "line⏎break"] and len(labels[4]) == 16


def test_a_long_row_is_an_area_or_its_strongest_keys(pyplot):
    x = RANDOM.standard_normal((500, 8)).astype(np.float32)
    ax = headway.plot_row(x, x, 7)
    assert ax.get_xlim() == (0, 500) and ax.get_title() == "row 7"
    named = headway.plot_row(x, x, 7, tokens=[str(n) for n in range(500)])
    best = np.sort(np.argsort(-headway.weights_in(x, x, (7, 8), (0, 500))[0], kind="stable")[:40])
    assert [label.get_text() for label in named.get_xticklabels()] == [str(n) for n in best]
    own = pyplot.subplots()[1]
    assert headway.plot_row(x, x, 7, keys=(5, 9), ax=own) is own and own.get_xlim() == (5, 9)


def test_errors_name_what_is_wrong(pyplot):
    x = RANDOM.standard_normal((1, 2, 4, 4))
    found = headway.analyze(x, x)
    for call, text in [
        (lambda: headway.plot_heads(found, value="median"), "value is 'median'"),
        (lambda: headway.plot_heads(found, titles=["one"]), "titles has 1 entries, expected 2"),
        (lambda: headway.plot_heads(headway.analyze(x, x, cells=0)), "nothing to show"),
        (lambda: headway.plot_row(x, x, 4), "row is 4, expected 0 to 3"),
        (lambda: headway.plot_row(x, x, 0, head=2), "head is 2, expected 0 to 1"),
        (lambda: headway.plot_row(x, x, 0, tokens=["a"]), "tokens has 1 entries, expected 4"),
    ]:
        with pytest.raises(ValueError, match=text):
            call()


def test_without_matplotlib_the_message_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    x = np.eye(3)
    with pytest.raises(ImportError, match="plot_row needs matplotlib: pip install matplotlib"):
        headway.plot_row(x, x, 0)


def test_a_notebook_shows_the_maps_once(monkeypatch):
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "get_backend", lambda: "module://matplotlib_inline.backend_inline")
    figure = headway.plot_heads(headway.analyze(np.eye(4), np.eye(4)))
    assert figure.number not in pyplot.get_fignums()  # or the end of the cell would draw it again
    monkeypatch.undo()
    assert headway.plot_heads(headway.analyze(np.eye(4), np.eye(4))).number in pyplot.get_fignums()
    pyplot.close("all")
