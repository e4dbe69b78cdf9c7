"""Wrong settings of ours, help and plans from profiles do not load Lightning, which takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_hetpipe.planning.plan.profile_file import save
from tests.cli.test_plan import FEW, PROFILE
from tests.support import forks

PROGRAM = """
import sys
from pytest import MonkeyPatch
from lightning_hetpipe.cli import start_up
from tests.support.composing import compose_once

compose_once(MonkeyPatch())
name = sys.argv[0].partition("-")[2]
try:
    getattr(start_up, name)()
finally:
    print("loaded:", *{name.partition(".")[0] for name in sys.modules} & {"lightning", "torchmetrics"})
"""


def run(program: str, *arguments: str, folder: Path) -> tuple[int, str, str]:
    start = f"import sys; sys.argv[0] = 'hetpipe-{program}'\n{PROGRAM}"
    ended = forks.run("-c", start, *arguments, loaded="commands", cwd=folder)
    assert ended.stdout.endswith("loaded:\n"), ended.stdout + ended.stderr
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("program", "arguments", "said"),
    [
        ("train", ["modle=gpt"], "modle is not a setting; did you mean model?"),
        ("train", ["in_flight=6"], "in_flight is not a setting; did you mean strategy.in_flight?"),
        ("plan", ["stages=2"], "stages is not a setting; did you mean strategy.stages?"),
        ("train", ["+sead=3"], "sead is not a setting; did you mean seed?"),
        ("train", ["strategy.in_fligt=6"], "strategy.in_fligt is not a setting; did you mean strategy.in_flight?"),
        ("train", ["strategy=plain", "strategy.in_fligt=6"], "did you mean strategy.in_flight?"),
        ("train", ["strategy.stages=two"], "strategy.stages=two must be a whole number of at least 1"),
        ("train", ["strategy.wsp.leese=3"], "strategy.wsp.leese is not a setting; did you mean strategy.wsp.lease?"),
        ("train", ["strategy.wsp.wave=0"], "strategy.wsp.wave=0 must be a whole number of at least 1"),
        ("train", ["strategy.plan=nowhere.json"], "strategy.plan=nowhere.json cannot be read (No such file"),
        ("train", ["strategy.wsp.wave=3", "strategy.wsp.shares=[1,2]"], "leave strategy.wsp.wave out"),
        ("train", ["cluster=mixed_box", "cluster.link=3"], "cluster.link=3 must be a Link"),
        ("train", ["seed=abc"], "seed=abc must be a whole number"),
        ("plan", ["profile=p.json", "devices=[T4]", "strategy.in_flight=0"], "strategy.in_flight=0 must be"),
        ("plan", ["profile=p.json", "devices=[T5]"], "devices=[T5] is neither in the profile"),
        ("plan", ["profile=p.json", "devices=[T4]", "optimizer=adamm"], "adamm"),
        ("plan", ["experiment=digits", "devices=[T5]"], "devices=[T5] is neither a device of this machine (cpu"),
        ("plan", ["experiment=digits", "devices=[T4]", "optimizer=adamm"], "adamm"),
        (
            "plan",
            ["experiment=digits", "cluster=mixed_box", "cluster.nodes.0.devices=[mine]"],
            "cluster has the device 'mine', which is neither a device of",
        ),
        ("plan", ["experiment=digits", "cluster=paper", "strategy.wsp.shares=[1,2]"], "strategy.wsp.shares=[1, 2] is"),
        ("plan", ["profile=p.json", "devices=[T4]", "strategy.stages=[1,2]"], "strategy.stages=[1, 2] is for several"),
        (
            "plan",
            ["profile=p.json", "devices=[T4]", "strategy.weights=2bw", "strategy.in_flight=3"],
            "and trainer.accumulate_grad_batches=1;",
        ),
        (
            "plan",
            ["experiment=digits", "devices=[T4]", "strategy.stages=2"],
            "strategy.stages=2 cannot be planned for 1",
        ),
        ("server", ["stattus"], "stattus is not a command; give serve or status"),
        ("server", ["address=7070"], "address=7070 must be host:port"),
        ("server", ["adress=1"], "adress is not a setting; did you mean address?"),
        ("host", ["address=7070"], "address=7070 must be host:port"),
    ],
)
def test_a_wrong_setting_of_ours(program: str, arguments: list[str], said: str, tmp_path: Path) -> None:
    save(PROFILE, tmp_path / "p.json")
    code, _, error = run(program, *arguments, folder=tmp_path)
    assert code == 2
    assert error.startswith(f"hetpipe-{program}: ")
    assert said in error
    assert "Traceback" not in error


@pytest.mark.parametrize("program", ["train", "plan", "server", "host"])
def test_help(program: str, tmp_path: Path) -> None:
    code, said, _ = run(program, "--help", folder=tmp_path)
    assert code == 0
    assert f"hetpipe-{program} --hydra-help shows Hydra's own options." in said


@pytest.mark.parametrize(
    "devices", ["devices=[RTX-3090,V100-16]", "cluster=mixed_box", "cluster=paper strategy.allocation=np"]
)
def test_a_plan_from_a_profile(devices: str, tmp_path: Path) -> None:
    save(FEW, tmp_path / "p.json")
    code, said, error = run("plan", "profile=p.json", *devices.split(), folder=tmp_path)
    assert code == 0, error
    assert "plan.json" in said
