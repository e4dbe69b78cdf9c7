"""Hosts have the settings of torch that the process of Lightning's loop has, by which results differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.hosts.stage_host import modes, set_modes
from tests.exact.running import assert_equal, expect, fit
from tests.hosts.elsewhere import Hosts, elsewhere
from tests.support.captured_models import Whole
from tests.support.models import CLASSES, Learner, vectors


@contextmanager
def legacy() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


@contextmanager
def switched(library: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(library, name)
    setattr(library, name, value)
    yield
    setattr(library, name, before)


def precise(library: Any, precision: str) -> Any:
    """Numbers are rounded, as set by the newer names, beside which torch refuses to tell the older ones."""
    return lambda: switched(library, "fp32_precision", precision)


@contextmanager
def without_denormals() -> Iterator[None]:
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


@contextmanager
def without_cudnns_attention() -> Iterator[None]:
    GPU.enable_cudnn_sdp(False)
    yield
    GPU.enable_cudnn_sdp(True)


BACKENDS: Any = torch.backends
CPU, GPU, CUDNN = BACKENDS.mkldnn, BACKENDS.cuda, BACKENDS.cudnn

CASES: dict[str, Any] = {
    "legacy": legacy,
    "matmul": precise(CPU.matmul, "bf16"),
    "conv": precise(CPU.conv, "bf16"),
    "rnn": precise(CPU.rnn, "bf16"),
    "denormals": without_denormals,
    "products of GPUs": precise(GPU.matmul, "tf32"),
    "convolutions of GPUs": precise(CUDNN.conv, "ieee"),
    "recurrent layers of GPUs": precise(CUDNN.rnn, "ieee"),
    "deterministic": lambda: switched(CUDNN, "deterministic", True),
    "benchmark": lambda: switched(CUDNN, "benchmark", True),
    "without cudnn": lambda: switched(CUDNN, "enabled", False),
    "sums of half": lambda: switched(GPU.matmul, "allow_fp16_reduced_precision_reduction", False),
    "sums of bfloat16": lambda: switched(GPU.matmul, "allow_bf16_reduced_precision_reduction", False),
    "attention": without_cudnns_attention,
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
def test_they_reach_processes(name: str, hosts: Hosts) -> None:
    def made() -> Learner:
        torch.manual_seed(7)
        return Whole(Tiny())

    with CASES[name]():
        expected = expect(made(), vectors(18, 4), 2)
        assert_equal(expected, fit(made(), vectors(18, 4), strategy=elsewhere(3, 2, 2, hosts.address)))
