"""State that every run leaves as it found it: threads, environment, signal handlers, files, torch's settings."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

MAY_STAY = {"CUBLAS_WORKSPACE_CONFIG", "PL_GLOBAL_SEED", "PL_SEED_WORKERS", "PYTEST_CURRENT_TEST", "CRC32C_SW_MODE"}
"""Environment variables that Lightning, pytest and TensorBoard themselves set."""

NOT_OURS = ("QueueFeederThread", "fsspecIO", "tqdm")
"""Threads of multiprocessing, fsspec and the progress bar, which end when they are done or with the process."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs in an empty folder, to which nothing but the run's own files go, and looks around afterwards."""
    where = Path.cwd()
    files = set(where.iterdir())
    monkeypatch.chdir(tmp_path)
    threads, environment = set(threading.enumerate()), dict(os.environ)
    handlers = {each: signal.getsignal(each) for each in SIGNALS}
    torch_before = _torch_settings()
    yield
    left = [thread for thread in set(threading.enumerate()) - threads if not thread.name.startswith(NOT_OURS)]
    for thread in left:
        thread.join(timeout=1)  # one that is on its last lines is not left behind
    assert not [thread.name for thread in left if thread.is_alive()]
    assert os.environ.keys() - environment.keys() <= MAY_STAY
    assert [each.name for each, handler in handlers.items() if signal.getsignal(each) is not handler] == []
    left_over = [path.name for path in set(where.iterdir()) - files if "lr_find" not in path.name]  # another test's
    assert set(left_over) <= {".pytest_cache", ".hypothesis"}
    assert _torch_settings() == torch_before


def _torch_settings() -> tuple[object, ...]:
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )
