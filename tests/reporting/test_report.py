"""A run's report as people read it: the table that ``print`` shows, and what stands where there is nothing to show."""

from __future__ import annotations

from typing import Any

from lightning_hetpipe.reporting.report import NOTHING, RunReport, StageReport


def stage(layers: list[str], layer_types: list[str], **other: Any) -> StageReport:
    given = {"device": "cpu", "time_s": 0.0031, "busy": 0.914, "parameters": 1234, "memory_bytes": 3 << 19}
    return StageReport(layers=layers, layer_types=layer_types, **{**given, **other})


def run(*stages: StageReport, minibatches: int = 10, **other: Any) -> RunReport:
    return RunReport(1, minibatches, 3120.4 if minibatches else 0.0, list(stages), **other)


def test_the_table_shows_each_stage_aligned() -> None:
    first, second = stage(["net.0", "net.1", "net.2"], ["Block", "Conv2d", "Block"]), stage(["net.3"], ["Linear"])
    lines = str(run(first, second)).splitlines()
    assert lines[0] == "Trained as a pipeline of 2 stages, 1 minibatch in flight"
    header, *rows = lines[2:5]
    assert header.split() == ["stage", "device", "layers", "parameters", "ms", "per", "minibatch", "busy", "memory"]
    assert "net.0 – net.2  Block ×2, Conv2d" in rows[0]
    assert rows[0].split()[-5:] == ["1,234", "3.1", "91%", "1.5", "MiB"]
    assert len(header) == len(rows[0]) == len(rows[1])
    assert rows[1].index("net.3") == rows[0].index("net.0") == header.index("layers")
    assert lines[-1] == "samples per second   3,120"


def test_of_several_virtual_workers_it_says_whose_it_is() -> None:
    lines = str(run(stage(["net"], ["Linear"]), virtual_worker=1, virtual_workers=2)).splitlines()
    assert lines[0] == "Trained as a pipeline of 1 stage, 1 minibatch in flight, as virtual worker 1 of 2"
    assert lines[-1] == "samples per second   3,120   of this virtual worker; each trains on a share of the data"


def test_the_table_says_what_its_times_are() -> None:
    text = str(run(stage(["net.0"], ["Linear"])))
    assert "ms per minibatch: forward and backward" in text
    assert "memory: the most at once of weight versions" in text
    text = str(run(stage(["net.0"], ["Linear"]), emulated=True))
    assert "ms per minibatch: what the stage takes on its emulated device" in text


def test_a_dash_stands_where_nothing_was_measured() -> None:
    unmeasured = stage(["net.0"], ["Linear"], time_s=0.0, busy=0.0, memory_bytes=None)
    lines = str(run(unmeasured, minibatches=0)).splitlines()
    assert lines[3].split()[-4:] == ["1,234", "–", "–", "–"]
    assert lines[-1] == "samples per second   –"


def test_columns_without_figures_have_no_note() -> None:
    """A spread run on several devices knows neither times nor bytes of each."""
    empty = stage(["net.0"], ["Linear"], time_s=0.0, busy=None, memory_bytes=None)
    text = str(run(empty, empty, spread=True))
    assert text.startswith("Trained as a spread run of 2 stages, 1 minibatch in flight\n")
    assert "ms per minibatch:" not in text
    assert "memory:" not in text
    assert "\n\n\n" not in text
    text = str(run(stage(["net.0"], ["Linear"], memory_bytes=None), spread=True))
    assert "ms per minibatch: forward, loss and backward, in training" in text


def test_what_print_shows_a_notebook_shows_too() -> None:
    report = run(stage(["net.0"], ["Linear"]))
    assert repr(report) == str(report)


def test_without_stages_it_is_a_sentence() -> None:
    assert str(RunReport()) == repr(RunReport()) == RunReport().table == NOTHING
    assert "\n" not in NOTHING
