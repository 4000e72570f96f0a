"""The example notebooks run from top to bottom, here on the simulated backend, and are kept small."""

from pathlib import Path

import nbformat
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("ENTROPIC_BACKEND", "simulated")
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel draws inline
    notebook = nbformat.read(path, as_version=4)
    client.NotebookClient(
        notebook, timeout=240, resources={"metadata": {"path": str(EXAMPLES)}}
    ).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_with_small_outputs_and_no_errors(path: Path) -> None:
    assert path.stat().st_size < 300_000
    notebook = nbformat.read(path, as_version=4)
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    assert outputs
    assert not [o for o in outputs if o.output_type == "error"]


def test_all_four_notebooks_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "compose_controllers",
        "identify_and_tune",
        "stability_margins",
        "write_a_controller",
    ]
