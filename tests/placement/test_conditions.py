"""Under what a profile that was kept on disk still holds, and under what another one is measured."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.capture.profiling import ProfilingInput
from lightning_hetpipe.pipeline.dtypes import Autocast
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.placement import measuring
from lightning_hetpipe.placement.measuring import kept, profiled
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times
from lightning_hetpipe.planning.plan.profile_file import ProfileCache
from tests.capture.test_microbenchmark import CPU, piece_of

BACKENDS: Any = torch.backends
IMAGES = torch.zeros(2, 3, 4, 4)


def encoder(heads: int = 2, **options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, heads, 16, batch_first=True, **options)


def piece(module: nn.Module | None = None, x: Tensor | None = None) -> Piece:
    chosen = encoder() if module is None else module
    return piece_of(chosen, inputs=[torch.zeros(2, 5, 8) if x is None else x])


def study(
    module: nn.Module | None = None, x: Tensor | None = None, *, autocast: Autocast | None = None, **options: Any
) -> ProfilingInput:
    shown = piece(module, x)
    if autocast is not None:
        shown.autocast = autocast
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], **{"lr": 0.1, **options})
    return ProfilingInput([shown], RandomGenerators(0), None, optimizer)


def key(shown: ProfilingInput | None = None, device: str = "cpu") -> str:
    return measuring.cache_key(study() if shown is None else shown, device, "32-true")


_source = functools.cache(inspect.getsource)


@pytest.fixture(autouse=True)
def _sources_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for the source of torch's modules takes nearly all the time of a key."""
    monkeypatch.setattr(inspect, "getsource", _source)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (study(), study(encoder(4))),
        (study(), study(encoder(norm_first=True))),
        (study(), study(encoder(activation="gelu"))),
        (study(), study(encoder().eval())),
        (study(), study(encoder().requires_grad_(False))),
        (study(), study(x=torch.zeros(2, 6, 8))),
        (study(), study(x=torch.zeros(2, 5, 8, requires_grad=True))),
        (study(), study(autocast=Autocast((("cpu", torch.bfloat16),), True))),
        (study(), study(momentum=0.9)),
        (study(), study(foreach=False)),
        (study(nn.Conv2d(3, 3, 1), IMAGES), study(nn.Conv2d(3, 3, 1), IMAGES.to(memory_format=torch.channels_last))),
        (study(nn.BatchNorm1d(5, affine=False)), study(nn.BatchNorm1d(5, affine=False, track_running_stats=False))),
    ],
)
def test_what_changes_times_is_measured_anew(one: ProfilingInput, other: ProfilingInput) -> None:
    assert key(one) != key(other)


@pytest.mark.parametrize("other", [study(), study(lr=0.2), study(momentum=0.0)])
def test_what_changes_none_is_not(other: ProfilingInput) -> None:
    assert key(other) == key()


@contextmanager
def fp32_precision(where: Any, value: str) -> Iterator[None]:
    before = where.fp32_precision
    where.fp32_precision = value
    try:
        yield
    finally:
        where.fp32_precision = before


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "setting",
    [
        lambda: fp32_precision(BACKENDS.mkldnn.matmul, "bf16"),
        # Having set this, torch.get_float32_matmul_precision() fails: both ways must not be mixed.
        lambda: fp32_precision(BACKENDS.cuda.matmul, "tf32"),
        lambda: fp32_precision(BACKENDS.cudnn.conv, "ieee"),
        lambda: threads(torch.get_num_threads() + 1),
        lambda: torch.backends.mkldnn.flags(enabled=False),
        lambda: torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]),
    ],
)
def test_so_is_what_is_set_in_the_process(setting: Callable[[], Any]) -> None:
    small = study(nn.Linear(8, 8))
    before = key(small)
    with setting():
        assert key(small) != before
    assert key(small) == before


def test_the_wheel_is_no_matter_but_the_version_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements made beside a GPU are found on a machine whose torch is for CPUs."""
    keys = []
    for version in ("2.13.0+cpu", "2.13.0+cu130", "2.13.1+cpu", "2.13.0a0+git1234"):
        monkeypatch.setattr(torch, "__version__", version)
        keys.append(key(device="RTX-3090"))
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_a_cpu_is_its_model_and_a_gpu_is_no_matter_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measuring.processor()
    cpu, gpu = key(), key(device="RTX-3090")
    monkeypatch.setattr(measuring, "processor", lambda: "another")
    assert key() != cpu
    assert key(device="RTX-3090") == gpu


def test_devices_whose_kernels_keep_other_bytes_have_one_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit on two kinds of GPU ended with an error where attention kept a little more on one of them."""
    found = iter([(100, 1.0), (120, 2.0)])

    def on(self: ProfilingInput, device: torch.device) -> Iterator[tuple[LayerBytes, Times]]:
        bytes_kept, seconds = next(found)
        yield LayerBytes("net.0", 1, bytes_kept, 3), Times(seconds, seconds)

    monkeypatch.setattr(ProfilingInput, "on", on)
    both = profiled(study(), {"RTX-3090": CPU, "T4": CPU}, "m", "32-true", None)
    assert [layer.kept for layer in both.layers] == [120]
    assert {name: times[0].forward for name, times in both.times.items()} == {"RTX-3090": 1.0, "T4": 2.0}


@pytest.mark.parametrize(
    "other",
    [
        Profile("m", 1, [LayerBytes("net.0", 1, 2, 3)], {"T4": [Times(1, 2)]}, {}),
        Profile("m", 1, [LayerBytes("net.0", 1, 2, 3)] * 2, {"RTX-3090": [Times(1, 2)] * 2}, {}),
    ],
)
def test_a_file_of_something_else_is_measured_anew(other: Profile, tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    cache.put(key(device="RTX-3090"), other)
    assert kept(study(), "RTX-3090", "m", "32-true", cache) is None
