"""Hosts have the settings of torch that the process of Lightning's loop has, by which results differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.hosts.stage_host import modes, set_modes
from tests.exact.pipelines import even
from tests.exact.running import assert_equal, expect, fit
from tests.support.captured_models import Whole
from tests.support.models import CLASSES, Learner, vectors


@contextmanager
def legacy() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


@contextmanager
def precise(work: str) -> Iterator[None]:
    """Products are of bfloat16, as set by the newer names, beside which torch refuses to tell the older ones."""
    settings: Any = getattr(torch.backends.mkldnn, work)
    before, settings.fp32_precision = settings.fp32_precision, "bf16"
    yield
    settings.fp32_precision = before


@contextmanager
def without_denormals() -> Iterator[None]:
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


CASES: dict[str, Any] = {
    "legacy": legacy,
    "matmul": lambda: precise("matmul"),
    "conv": lambda: precise("conv"),
    "rnn": lambda: precise("rnn"),
    "denormals": without_denormals,
}


@pytest.mark.parametrize("name", CASES)
def test_they_are_read_and_set(name: str) -> None:
    usual = modes()
    with CASES[name]():
        changed = modes()
        assert changed != usual
    try:
        set_modes(changed)
        assert modes() == changed
    finally:
        set_modes(usual)
    assert modes() == usual


class Tiny(nn.Module):
    """Layers with values between them that are too small for normal numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * 1e-39
        y: Tensor = self.last(torch.tanh(self.second(x * 1e38 * 10)))
        return y


@pytest.mark.parametrize("name", ["matmul", "denormals"])
def test_they_reach_processes(name: str) -> None:
    def made() -> Learner:
        torch.manual_seed(7)
        return Whole(Tiny())

    with CASES[name]():
        expected = expect(made(), vectors(18, 4), 2)
        assert_equal(expected, fit(made(), vectors(18, 4), strategy=even(3, 2, 2, stage_hosts="processes")))
