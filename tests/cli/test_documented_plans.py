"""The commands, the cluster and the program of docs/planning.md do what it says."""

from __future__ import annotations

import re
import runpy
import shlex
import textwrap
from pathlib import Path

import pytest

from benchmarks import sailor_files
from lightning_hetpipe import Plan
from lightning_hetpipe.planning.model import catalogue
from lightning_hetpipe.planning.plan.profile_file import save
from tests.cli.conftest import Train
from tests.cli.test_plan import FEW, PROFILE, Run, folder, plan
from tests.cli.test_train import FAST
from tests.support.sailor import checkout

__all__ = ["folder", "plan"]

DOCUMENT = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
COMMANDS = re.findall(r"^    hetpipe-plan (?!measure)(.*)$", DOCUMENT, re.M)
(CONVERSION,) = re.findall(r"^    python -m benchmarks.sailor_files (.*)$", DOCUMENT, re.M)
RUNS = re.findall(r"^    hetpipe-train (.*)$", DOCUMENT, re.M)
((LAB, _),) = re.findall(r"^```yaml\n(# (lab\.yaml)\n.*?)^```", DOCUMENT, re.M | re.S)
(POLICIES,) = re.findall(r"^    weights    in flight .*\n(?:    .*\n)+", DOCUMENT, re.M)
((PROGRAM, _),) = re.findall(r"^```python\n(# (plan\.py)\n.*?)^```", DOCUMENT, re.M | re.S)


@pytest.fixture
def prepared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files that the document speaks of: profiles, and a cluster of one's own."""
    monkeypatch.setenv("HETPIPE_CACHE", str(folder / "cache"))
    save(PROFILE, folder / "profile.json")
    checkout(folder / "sailor", {"OPT-350": {"A100-40": (2, 4), "V100-16": (2, 4)}})
    assert sailor_files.main(shlex.split(CONVERSION)) == 0
    (folder / "mine" / "cluster").mkdir(parents=True)
    (folder / "mine" / "cluster" / "lab.yaml").write_text(LAB)
    return folder


def test_there_are_these() -> None:
    assert len(COMMANDS) == 14


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(each, marks=[pytest.mark.slow] * ("experiment=" in each or each.endswith("cluster=paper")))
        for each in COMMANDS
    ],
)
def test_the_command(plan: Run, prepared: Path, command: str) -> None:
    arguments = shlex.split(command)
    if "cluster=lab" in arguments:
        save(FEW, prepared / "profile.json")
    said, error = plan(*arguments)
    assert "in flight, " in said
    assert "Traceback" not in error
    if "strategy.in_flight=4" in arguments and "profile=profile.json" in arguments:
        assert textwrap.dedent(POLICIES) in said
    made = list(prepared.rglob("plan.json"))
    assert len(made) == (3 if "-m" in arguments else 1)
    for each in made:
        Plan.load(each).check()
        assert each.with_name("plan.png").exists()
        assert each.with_name("profile.json").exists() == ("profile=" not in command)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:stage . computed for longer than it is to take")
def test_the_runs(plan: Run, train: Train, prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a plan for devices that are here, one for others beside these, and one for those others alone."""
    assert len(RUNS) == 3
    small = ["data.max_bytes=20000"]
    for devices, command in zip(["devices=[cpu,cpu]", "cluster=mixed_box", None], RUNS, strict=True):
        if devices is not None:
            plan("experiment=gpt", devices, *small, "hydra.run.dir=.")
        arguments = shlex.split(command)
        train(*arguments, *(small if "experiment=gpt" in arguments else []), *FAST)
        said = capsys.readouterr().out
        assert ("(emulated)" in said) == ("cluster=mixed_box" in arguments)
        if "strategy.plan=plan.json" in arguments:
            made = Plan.load("plan.json")
            stages = f"{len(made.virtual_workers[0].stages)} stages"
            assert f"Trained as a pipeline of {stages}, {made.in_flight} minibatches in flight" in said


def test_the_program(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "plan.py").write_text(PROGRAM)
    runpy.run_path("plan.py", run_name="__main__")
    assert "box RTX-3090:0" in capsys.readouterr().out
    Plan.load(folder / "plan.json").check()


def test_the_list_of_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r'^    python -c "(.*)"$', DOCUMENT, re.M)
    exec(code, {})
    assert capsys.readouterr().out.split() == list(catalogue.gpus())


def test_the_error_of_estimates_is_the_one_that_is_measured() -> None:
    """See tests/planning/test_catalogue.py, which measures the docstring's."""
    figures = r"factor of (1\.\d\d) on average,? and of (1\.\d\d) at\s+worst"
    said = re.search(figures, " ".join((catalogue.speed_by.__doc__ or "").split()))
    documented = re.search(figures, " ".join(DOCUMENT.split()))
    assert said is not None
    assert documented is not None
    assert documented.groups() == said.groups()
