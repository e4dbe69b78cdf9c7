"""Profile of the layers that a watched step has shown: measured once on each type of device, and kept on disk."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from lightning_hetpipe.accelerator import accelerates
from lightning_hetpipe.capture.measured_widths import measured_widths
from lightning_hetpipe.capture.profiling import METHOD, ROUNDS, ProfilingInput, code_of
from lightning_hetpipe.pipeline.values import Value
from lightning_hetpipe.placement.progress import Bar, hidden
from lightning_hetpipe.planning.model.catalogue import known, speed_by
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times
from lightning_hetpipe.planning.model.stage_memory import COPIES, OPTIMIZERS, WEIGHT_DECAY
from lightning_hetpipe.planning.plan.profile_file import Conditions, ProfileCache

UNKNOWN_OPTIMIZER = "adam"
"""Optimizer whose state is assumed for one that the memory model does not know."""

_WHEEL = re.compile(r"\+(cpu|cu\d+)$")


def profiled(
    profiling: ProfilingInput,
    devices: Mapping[str, torch.device],
    model: str,
    precision: str,
    cache: ProfileCache | None,
    bar: Bar = hidden,
    with_speeds: bool = False,
    with_widths: bool = False,
) -> Profile:
    """The profile of the layers on ``devices``, of which there is at least one.

    Args:
        profiling: What the watched step has shown.
        devices: By the name of their type.
        model: For people.
        precision: The Trainer's.
        cache: Where to look for what was measured before, and to put what is measured now; None for nowhere.
        bar: Shows the measuring.
        with_speeds: Whether also the speed of devices that the catalogue does not know is measured, for estimates of
            others. It takes some 140 MB there.
        with_widths: Whether also parts of layers are measured that a group of devices may divide.
    """
    found: Profile | None = None
    for name, device in devices.items():
        before = kept(profiling, name, model, precision, cache)
        one = _measured(profiling, device, name, model, bar) if before is None else before
        if with_speeds and known(name) is None and name not in one.speeds:
            one = replace(one, speeds={name: measured_speed(device)})
        if with_widths and not one.widths:
            with bar(f"measuring parts of layers on {name}", len(one.layers)) as tick:
                one = replace(one, widths=measured_widths(profiling, device, name, tick))
        if cache is not None and one is not before:
            cache.put(conditions(profiling, name, precision).key(), one)
        found = one if found is None else _joined(found, one)
    assert found is not None
    return found


def _joined(one: Profile, other: Profile) -> Profile:
    """Merge the times of both devices; of the bytes that kernels keep there, a profile has the larger number."""
    layers = [
        replace(mine, kept=max(mine.kept, theirs.kept)) for mine, theirs in zip(one.layers, other.layers, strict=True)
    ]
    return replace(one, layers=layers).joined(replace(other, layers=layers))


def kept(
    profiling: ProfilingInput, name: str, model: str, precision: str, cache: ProfileCache | None
) -> Profile | None:
    """Kept profile of devices of that ``name``, perhaps from another machine; None if there is none."""
    one = None if cache is None else cache.get(conditions(profiling, name, precision).key())
    # Other layers are those of a file that somebody has changed.
    if one is None or name not in one.times or len(one.layers) != len(profiling.layers):
        return None
    return replace(one, model=model, samples=profiling.samples, calls=profiling.calls, user=profiling.user)


def _measured(profiling: ProfilingInput, device: torch.device, name: str, model: str, bar: Bar) -> Profile:
    sizes: list[LayerBytes] = []
    times: list[Times] = []
    with bar(f"measuring on {name}", len(profiling.layers)) as tick:
        for size, time in profiling.on(device):
            sizes.append(size)
            times.append(time)
            tick()
    return Profile(model, profiling.samples, sizes, {name: times}, {}, calls=profiling.calls, user=profiling.user)


def layer_seconds(profiling: ProfilingInput, device: torch.device | None, bar: Bar) -> list[float]:
    """Measure seconds of each layer, forward and backward, on ``device`` or where it lies."""
    rounds = ROUNDS * sum(len(values) for _, values, _ in profiling.layers)
    there = {str(each.device) for layer, _, _ in profiling.layers for each in layer.module.parameters()}
    where = device or " and ".join(sorted(there)) or "cpu"
    with bar(f"measuring on {where}", rounds) as tick:
        return profiling.seconds(device, tick=tick)


def optimizer_name(optimizer: torch.optim.Optimizer) -> str | None:
    """Name of ``optimizer`` in the memory model; None if it does not know it."""
    name, options = type(optimizer).__name__.lower(), optimizer.defaults
    copies = name in COPIES
    if name in ("sgd", "rmsprop") and options.get("momentum"):
        name = f"{name}_momentum"
    if options.get("centered"):
        name = f"{name}_centered"
    if options.get("amsgrad"):
        name = "amsgrad"
    if name not in OPTIMIZERS:
        return None
    decays = any(group.get("weight_decay") or group.get("maximize") for group in optimizer.param_groups)
    return f"{name}{WEIGHT_DECAY}" if copies and decays else name


def known_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Name of ``optimizer`` in the memory model, or of the one that is assumed for it."""
    return optimizer_name(optimizer) or UNKNOWN_OPTIMIZER


def conditions(profiling: ProfilingInput, device: str, precision: str) -> Conditions:
    """Conditions of measuring the layers of ``profiling`` on a device; where they differ, no kept profile holds.

    They are the same on a machine that has the device and on one that has not, so that a cache can be copied there:
    which of its wheels of one version torch came in is left out.
    """
    layers = [(layer.name, layer.module) for layer, _, _ in profiling.layers]
    return Conditions(
        layers=[(name, code_of(module)) for name, module in layers],
        parameters=[
            (f"{name}.{own}", tuple(each.shape), f"{each.dtype} {each.requires_grad} {_strides(each)}")
            for name, module in layers
            for own, each in [*module.named_parameters(), *module.named_buffers()]
        ],
        inputs=[each for _, values, _ in profiling.layers for value, times in values for each in _inputs(value, times)],
        precision=precision,
        torch=_WHEEL.sub("", torch.__version__),
        device=device,
        settings=_settings(profiling) | ({"processor": processor()} if device == "cpu" else {}),
    )


def processor() -> str:
    """Name of this machine's CPU, and the instructions that torch uses of it."""
    model = platform.processor()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), model)
    except OSError:  # another system
        pass
    return f"{model or platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _settings(profiling: ProfilingInput) -> dict[str, str]:
    """Settings of the process and of the Trainer."""
    backends: Any = torch.backends
    found = {
        "method": METHOD,
        "finetuned": profiling.finetuned,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default dtype": profiling.default_dtype,
        "autocast": [[str(dtype) for kind, dtype in piece.autocast.dtypes if dtype] for piece in profiling.pieces],
        "optimizer": f"{type(profiling.optimizer).__module__}.{type(profiling.optimizer).__qualname__}",
        # Those that decide how a step is computed are switches, or off at zero; how large the others are is no matter.
        "options": _switches({} if profiling.optimizer is None else profiling.optimizer.defaults),
        # These can be read whichever of torch's two ways to set them the user has taken.
        "matmul": [backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision],
        "convolutions": [backends.cudnn.conv.fp32_precision, backends.cudnn.benchmark, backends.mkldnn.enabled],
        "rnn": backends.cudnn.rnn.fp32_precision,
        "attention": [backends.cuda.flash_sdp_enabled(), backends.cuda.mem_efficient_sdp_enabled()],
    }
    return {name: str(value) for name, value in found.items()}


def _switches(options: Mapping[str, object]) -> dict[str, bool | None]:
    plain = {name: value for name, value in options.items() if value is None or isinstance(value, bool | int | float)}
    return {name: None if plain[name] is None else bool(plain[name]) for name in sorted(plain)}


def _inputs(value: Value, times: int) -> list[tuple[tuple[int, ...], str]]:
    tensors = zip(value.tensors, value.requires_grad, strict=True)
    others = [repr(each) for each in value.others if isinstance(each, bool | int | float | str)]
    return [
        *((tuple(each.shape), f"{each.dtype} {wanted} {_strides(each)}") for each, wanted in tensors),
        *(((), text) for text in others),
        *([((), f"in {times} calls")] if times > 1 else []),
    ]


def _strides(tensor: torch.Tensor) -> str:
    """Channels that come last make convolutions faster, or slower."""
    return str(tensor.stride() if tensor.layout is torch.strided else tensor.layout)


SIZE = 1024
"""Rows and columns of the matrices whose product shows the peak: 2.1 GFLOP."""

BYTES = 64 << 20
"""Bytes that are copied to show the bandwidth of memory, more than caches hold."""

_ROUNDS = 5


def measured_speed(device: torch.device) -> float:
    """FLOP/s of ``device`` in 32 bits: from the fastest of some products of matrices, and of some copies in memory.

    No random number is drawn.
    """
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        one, product = (torch.ones(SIZE, SIZE, dtype=torch.float32, device=device) for _ in range(2))
        source, target = (torch.ones(BYTES, dtype=torch.uint8, device=device) for _ in range(2))
        peak = 2 * SIZE**3 / _fastest(lambda: torch.mm(one, one, out=product), device)
        bandwidth = 2 * BYTES / _fastest(lambda: target.copy_(source), device)  # each byte is read and written
    return speed_by(peak, bandwidth)


def _fastest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest run, after one that warms up."""
    found = []
    for _ in range(1 + _ROUNDS):
        began = time.perf_counter()
        run()
        if accelerates(device):
            torch.accelerator.synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found[1:])
