"""What a notebook shows: cells run by a real kernel."""

import pytest

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")


def run(tmp_path, *cells):
    """The outputs of each cell."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    return [cell.outputs for cell in notebook.cells]


@pytest.mark.filterwarnings("ignore")
def test_pages_traces_and_figures_are_shown_in_place_once(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    _, first, second, trace, figure, server = run(
        tmp_path,
        "import numpy as np, headway\nx = np.random.rand(1, 2, 5, 8)",
        "headway.view(x, x, tokens=list('abcde'))",
        "headway.view(x, x, causal=True)",
        "headway.trace(x[0, 0], x[0, 0], x[0, 0])",
        "headway.plot_heads(headway.analyze(x, x))",
        "headway.view(x, x, serve=True)",
    )
    for outputs in (first, second, trace):
        (output,) = outputs
        assert output.data["text/html"].startswith("<iframe srcdoc=")
    assert first[0].data["text/plain"] == "Page('attention.html')"
    assert [path.name for path in tmp_path.iterdir()] == ["attention.html"]
    assert [("image/png" in output.data) for output in figure] == [True]
    assert "http://127.0.0.1:" in server[0].data["text/html"]


@pytest.mark.filterwarnings("ignore")
def test_a_long_analysis_shows_its_progress(tmp_path):
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    (outputs,) = run(
        tmp_path,
        "import numpy as np, headway\n"
        "x = np.random.default_rng(0).standard_normal((6000, 4)).astype(np.float32)\n"
        "_ = headway.analyze(x, x, engine='reference')",
    )
    shown = "".join(output.get("text", "") or str(output.get("data", "")) for output in outputs)
    assert "headway" in shown and "%" in shown
