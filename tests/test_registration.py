"""Lightning knows "hetpipe" whichever of the two is imported first; without Lightning the package loads none of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forks
from tests.support.marks import slow_except

TRAIN = """
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

def test_hetpipe():
    assert "hetpipe" in StrategyRegistry
    strategy = Trainer(strategy="hetpipe", accelerator="cpu", logger=False, barebones=True).strategy
    from lightning_hetpipe import HetPipeStrategy
    from lightning_hetpipe.errors import SettingError
    assert isinstance(strategy, HetPipeStrategy)
    assert isinstance(StrategyRegistry.get("hetpipe"), HetPipeStrategy)
    for kind in (SettingError, MisconfigurationException):
        try:
            HetPipeStrategy(stages=0)
        except kind as error:
            assert "stages=0" in str(error)
        else:
            raise AssertionError(f"it is no {kind}")
"""
BEFORE = """
import sys
import lightning_hetpipe
from lightning_hetpipe import Cluster, Plan
from lightning_hetpipe.errors import SettingError
try:
    Cluster([])
except SettingError as error:
    early = error
assert "lightning" not in sys.modules
finder = sys.meta_path[0]
assert type(finder).__module__.startswith("lightning_hetpipe")
import lightning
assert finder not in sys.meta_path, "it has done its work"
from lightning.pytorch.utilities.exceptions import MisconfigurationException
assert isinstance(early, MisconfigurationException)
"""
AGAIN = "import importlib; importlib.reload(ours)"
ORDERS = {
    "ours first": f"{BEFORE}\n{TRAIN}\ntest_hetpipe()",
    "Lightning's first, and ours twice": (
        f"import lightning, lightning_hetpipe as ours\n{TRAIN}\ntest_hetpipe()\n{AGAIN}\ntest_hetpipe()"
    ),
    "the strategy alone": f"from lightning_hetpipe import HetPipeStrategy\n{TRAIN}\ntest_hetpipe()",
}


@pytest.mark.parametrize("order", slow_except(ORDERS, "ours first", "Lightning's first, and ours twice"))
def test_both_orders_of_import(order: str) -> None:
    run = forks.run("-c", ORDERS[order], loaded="libraries")
    assert run.returncode == 0, run.stderr


def test_as_a_plugin_of_pytest(tmp_path: Path) -> None:
    """Nothing in the suite names the package, and pytest loads it before Lightning."""
    (tmp_path / "test_theirs.py").write_text(TRAIN)
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "lightning_hetpipe"]
    run = forks.run(*command, loaded="libraries", cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    "program",
    ["from lightning_hetpipe import HetPipeStrategy", "from lightning_hetpipe.cli import start_up; start_up.train()"],
)
def test_a_torchvision_of_another_build_is_named(program: str, tmp_path: Path) -> None:
    """Lightning imports it for its metrics, and the error was of an operator "torchvision::nms"."""
    (tmp_path / "torchvision.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")')
    (tmp_path / "lightning.py").write_text("import torchvision")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=200
    )
    assert run.returncode == 1
    assert "torchvision is of another build than torch, so that Lightning cannot be imported; install" in run.stderr
