"""``pytest -p lightning_hetpipe``: how other people's suites get the strategy; an import leaves the process alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.black_box import OURS

SUITE = """
import os
import signal
import threading

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel


@pytest.fixture(autouse=True)
def police():
    threads, variables = set(threading.enumerate()), set(os.environ)
    handler = signal.getsignal(signal.SIGINT)
    yield
    assert set(threading.enumerate()) == threads
    assert set(os.environ) == variables
    assert signal.getsignal(signal.SIGINT) is handler


def test_fit(tmp_path):
    trainer = Trainer(default_root_dir=tmp_path, fast_dev_run=2, enable_progress_bar=False)
    trainer.fit(BoringModel())
    assert trainer.global_step == 2
    assert type(trainer.strategy).__name__ == "HetPipeStrategy"


def test_own_choice(tmp_path):
    trainer = Trainer(default_root_dir=tmp_path, fast_dev_run=1, enable_progress_bar=False, strategy="auto")
    trainer.fit(BoringModel())
    assert type(trainer.strategy).__name__ == "SingleDeviceStrategy"
"""

RUN = """
import json, os, signal, sys, threading
import lightning.pytorch, torch

def state():
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "environment": dict(os.environ),
        "signals": [str(signal.getsignal(each)) for each in sorted(signal.valid_signals())],
        "torch": [torch.get_num_threads(), str(torch.get_default_dtype()), torch.initial_seed()],
        "random": torch.get_rng_state().tolist(),
        "folder": sorted(os.listdir()),
        "hooks": [sys.excepthook.__module__, threading.excepthook.__module__, len(sys.meta_path)],
    }

before, modules = state(), set(sys.modules)
import lightning_hetpipe
after = state()
found = {
    "changed": [name for name in before if before[name] != after[name]],
    "modules": sorted({name.partition(".")[0] for name in set(sys.modules) - modules}),
}
print(json.dumps(found), flush=True)

import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "lightning_hetpipe", "test_theirs.py"]))
"""

HEAVY = {"grpc", "hydra", "matplotlib", "pytest", "sklearn", "tensorboard", "torchvision", "transformers"}


@pytest.mark.slow
def test_a_suite_that_knows_nothing_of_us(tmp_path: Path) -> None:
    """It passes unchanged, and where it names a strategy of its own it gets that one.

    The import alone starts no thread, sets no variable, signal handler or seed, and brings nothing heavy along.
    """
    (tmp_path / "test_theirs.py").write_text(SUITE)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PL_", "PYTEST"))}
    run = subprocess.run(
        [sys.executable, "-c", RUN],
        capture_output=True,
        cwd=tmp_path,
        env={**variables, **OURS},
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 passed" in run.stdout
    found = json.loads(run.stdout.splitlines()[0])
    assert found["changed"] == []
    assert HEAVY & set(found["modules"]) == set()
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["test_theirs.py"]
