"""Profile of the layers that a watched step has shown, measured once on each type of device and cached on disk.

Stages on a CPU emulate devices that are not here: their times have the ratios of these devices (:func:`slowed`).
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_hetpipe.accelerator import accelerates
from lightning_hetpipe.capture.measured_widths import measured_widths
from lightning_hetpipe.capture.profiling import METHOD, ROUNDS, ProfilingInput, code_of
from lightning_hetpipe.emulation import Pad
from lightning_hetpipe.pipeline.values import Value
from lightning_hetpipe.placement.progress import Bar, hidden
from lightning_hetpipe.planning.model.catalogue import known, speed_by
from lightning_hetpipe.planning.model.cluster import Cluster
from lightning_hetpipe.planning.model.estimate import StageEstimate
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times
from lightning_hetpipe.planning.model.stage_memory import COPIES, OPTIMIZERS, WEIGHT_DECAY
from lightning_hetpipe.planning.plan.profile_file import ProfileCache, key_of

UNKNOWN_OPTIMIZER = "adam"
"""Optimizer whose state is assumed for an optimizer that the memory model does not know."""

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
    """Return the profile of the layers on ``devices``, at least one, each given by the name of its type.

    Args:
        cache: Cache of measurements, or None.
        bar: Shows the progress of measuring.
        with_speeds: Whether to measure the speed of devices that the catalogue does not know, for estimates of other
            devices. Measuring takes about 140 MB on the device.
        with_widths: Whether to measure parts of layers that a group of devices may divide.
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
            cache.put(cache_key(profiling, name, precision), one)
        found = one if found is None else _joined(found, one)
    assert found is not None
    return found


def _joined(one: Profile, other: Profile) -> Profile:
    """Merge the times of both devices. Of the bytes that kernels keep, take the larger number."""
    layers = [
        replace(mine, kept=max(mine.kept, theirs.kept)) for mine, theirs in zip(one.layers, other.layers, strict=True)
    ]
    return replace(one, layers=layers).joined(replace(other, layers=layers))


def kept(
    profiling: ProfilingInput, name: str, model: str, precision: str, cache: ProfileCache | None
) -> Profile | None:
    """Return the cached profile of devices named ``name``, perhaps from another machine, or None."""
    one = None if cache is None else cache.get(cache_key(profiling, name, precision))
    # A different number of layers means that somebody has changed the file.
    if one is None or name not in one.times or len(one.layers) != len(profiling.layers):
        return None
    return replace(one, model=model, samples=profiling.samples, calls=profiling.calls, user=profiling.user)


def _measured(profiling: ProfilingInput, device: torch.device, name: str, model: str, bar: Bar) -> Profile:
    found = list[tuple[LayerBytes, Times]]()
    with bar(f"measuring on {name}", len(profiling.layers)) as tick:
        for each in profiling.on(device):
            found.append(each)
            tick()
    sizes, times = zip(*found, strict=True)
    return Profile(model, profiling.samples, sizes, {name: times}, {}, calls=profiling.calls, user=profiling.user)


def layer_seconds(profiling: ProfilingInput, device: torch.device | None, bar: Bar) -> list[float]:
    """Measure the seconds of each layer, forward and backward, on ``device`` or on the layers' own devices."""
    rounds = ROUNDS * sum(len(values) for _, values, _ in profiling.layers)
    there = {str(each.device) for layer, _, _ in profiling.layers for each in layer.module.parameters()}
    where = device or " and ".join(sorted(there)) or "cpu"
    with bar(f"measuring on {where}", rounds) as tick:
        return profiling.seconds(device, tick=tick)


def optimizer_name(optimizer: torch.optim.Optimizer | None) -> str | None:
    """Return the name of ``optimizer`` in the memory model, or None if it is unknown there."""
    if optimizer is None:
        return None
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


def known_optimizer(optimizer: torch.optim.Optimizer | None) -> str:
    """Return the name of ``optimizer`` in the memory model, or of the optimizer that is assumed for it."""
    return optimizer_name(optimizer) or UNKNOWN_OPTIMIZER


def cache_key(profiling: ProfilingInput, device: str, precision: str) -> str:
    """Return the key of the cached profile of ``profiling`` on a device. If a condition differs, it is another key.

    It is equal on machines with and without the device, so that a cache can be copied. So the variant of torch's wheel
    is left out.
    """
    layers = [(layer.name, layer.module) for layer, _, _ in profiling.layers]
    conditions = {
        "layers": [(name, code_of(module)) for name, module in layers],
        "parameters": [
            (f"{name}.{own}", tuple(each.shape), f"{each.dtype} {each.requires_grad} {_strides(each)}")
            for name, module in layers
            for own, each in [*module.named_parameters(), *module.named_buffers()]
        ],
        "inputs": [inputs for _, values, _ in profiling.layers for each in values for inputs in _inputs(*each)],
        "precision": precision,
        "torch": _WHEEL.sub("", torch.__version__),
        "device": device,
        "settings": _settings(profiling) | ({"processor": processor()} if device == "cpu" else {}),
    }
    return key_of(conditions)


def processor() -> str:
    """Name this machine's CPU, and the instructions that torch uses on it."""
    model = platform.processor()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), model)
    except OSError:  # another system
        pass
    return f"{model or platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _settings(profiling: ProfilingInput) -> dict[str, str]:
    backends: Any = torch.backends
    found = {
        "method": METHOD,
        "finetuned": profiling.finetuned,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default dtype": profiling.default_dtype,
        "autocast": [[str(dtype) for kind, dtype in piece.autocast.dtypes if dtype] for piece in profiling.pieces],
        "optimizer": f"{type(profiling.optimizer).__module__}.{type(profiling.optimizer).__qualname__}",
        # Options that decide how a step is computed are switches, or zero when off. Other sizes do not matter.
        "options": _switches({} if profiling.optimizer is None else profiling.optimizer.defaults),
        # These can be read in whichever of torch's two ways the user has set them.
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
    """Describe the order in memory: if channels come last, convolutions are faster or slower."""
    return str(tensor.stride() if tensor.layout is torch.strided else tensor.layout)


SIZE = 1024
"""Rows and columns of the matrices whose product shows the peak: 2.1 GFLOP."""

BYTES = 64 << 20
"""Bytes that are copied to show the bandwidth of memory. Caches hold less."""

_ROUNDS = 5


def measured_speed(device: torch.device) -> float:
    """Measure the FLOP/s of ``device`` in 32 bits by matrix products and copies in memory, without random numbers."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        one, product = (torch.ones(SIZE, SIZE, dtype=torch.float32, device=device) for _ in range(2))
        source, target = (torch.ones(BYTES, dtype=torch.uint8, device=device) for _ in range(2))
        peak = 2 * SIZE**3 / _fastest(lambda: torch.mm(one, one, out=product), device)
        bandwidth = 2 * BYTES / _fastest(lambda: target.copy_(source), device)  # each byte is read and written
    return speed_by(peak, bandwidth)


def _fastest(run: Callable[[], object], device: torch.device) -> float:
    found = []
    for _ in range(1 + _ROUNDS):
        began = time.perf_counter()
        run()
        if accelerates(device):
            torch.accelerator.synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found[1:])


SHARE = 1 / 3
"""Fraction of the CPU's cores on which stages may compute at once. Lightning's loop and the system need the rest."""

LEAST = 2.0
"""Time of the fastest device relative to its layers' time on the CPU: a stage does more than compute layers."""

TOLERATED = 0.1
"""Fraction of an emulated stage's passes that may take too long before a warning."""


def slowed(profile: Profile, cluster: Cluster) -> tuple[Profile, float]:
    """Return the profile that emulated devices follow, and the factor by which its times are longer than ``profile``.

    Measured seconds of an emulated device, or seconds derived from them, are kept. If only this machine's CPU was
    measured, only ratios are known: the fastest device then takes at least :data:`LEAST` times as long as the CPU. It
    takes longer if all devices together need more than the CPU's cores.
    """
    if not _knows_ratios_only(profile):
        return profile, 1.0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    speeds = relative_speeds(profile, cluster)
    factor = max(LEAST * max(speeds), sum(speeds) / (SHARE * cores))
    times = {name: [each.divided(1 / factor) for each in own] for name, own in profile.times.items()}
    return replace(profile, times=times), factor


def _knows_ratios_only(profile: Profile) -> bool:
    """Return True if only this machine's CPU was measured."""
    return set(profile.times) - set(profile.estimated) == {"cpu"}


def relative_speeds(profile: Profile, cluster: Cluster) -> list[float]:
    """Return the speed of each device on the whole model, relative to the CPU."""
    cpu = sum(each.forward + each.backward for each in profile.times["cpu"])
    whole = [sum(each.forward + each.backward for each in profile.times_on(slot.device)) for slot in cluster.slots]
    return [cpu / each if each else 1.0 for each in whole]


def pads(stages: Sequence[StageEstimate]) -> list[Pad]:
    """Return the time of each stage: its layers on its device, and transfers to it over the links."""
    return [Pad(s.times.forward + s.times.receive, s.times.backward + s.times.receive_gradient) for s in stages]


def described(profile: Profile, cluster: Cluster, factor: float) -> str:
    """Describe in one line the emulated devices and their speeds."""
    if not _knows_ratios_only(profile):
        names = ", ".join(dict.fromkeys(slot.device.name for slot in cluster.slots))
        return f"{names} are emulated on this CPU: each stage takes the seconds of its device's profile"
    devices = [slot.device for slot in cluster.slots]
    kinds = [each.name if each.speed == 1.0 else f"{each.name} of speed {each.speed:g}" for each in devices]
    speeds = dict(zip(kinds, relative_speeds(profile, cluster), strict=True))
    each = ", ".join(f"{name} {factor / speed:.2g}" for name, speed in speeds.items())
    return (
        f"the devices are emulated on this CPU, and take as many times as long as it does: {each}; only their ratios"
        " mean something, and links, which are not slowed down, look faster next to them than they are"
    )
