"""The notebook among the examples: its cells run in order, and what they end with shows itself.

The cells run without IPython, whose kernel would bring some thirty packages: a cell's last expression is shown as
IPython shows it, by its ``_repr_png_`` where that gives a picture, else by its ``repr``.
"""

from __future__ import annotations

import ast
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_hetpipe import demo

NOTEBOOK: dict[str, Any] = json.loads((Path(__file__).parents[2] / "examples" / "timeline.ipynb").read_text())
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def run(source: str, names: dict[str, Any]) -> Any:
    """Run a cell in the namespace ``names``; give the value of the expression that it ends with, else None."""
    *statements, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        statements, last = [*statements, last], ast.Expr(ast.Constant(None))
    exec(compile(ast.Module(statements, []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def shown(value: Any) -> bytes | str | None:
    if value is None:
        return None
    picture: bytes | None = value._repr_png_() if hasattr(value, "_repr_png_") else None
    return repr(value) if picture is None else picture


def test_the_cells_run_and_show_the_report_and_the_timelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a smaller network, whose layers are found and computed sooner."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "ResNet", partial(demo.ResNet, width=4, blocks=1))
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = [shown(run("".join(cell["source"]), names)) for cell in CELLS]
    assert outputs[0] is None
    assert str(outputs[1]).startswith("Trained as a pipeline of 3 stages, 4 minibatches in flight\n")
    pictures = outputs[2:]
    assert len(pictures) == 3
    assert all(isinstance(picture, bytes) and picture.startswith(b"\x89PNG") for picture in pictures)
    assert len(set(pictures)) == 3


def test_it_is_stored_without_outputs() -> None:
    """So that a change of it can be read."""
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert [(cell["outputs"], cell["execution_count"]) for cell in CELLS] == [([], None)] * len(CELLS)
