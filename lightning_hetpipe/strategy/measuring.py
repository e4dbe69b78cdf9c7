"""Profiles what a watched step has shown: each layer on one device of each type, measured once and kept on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from lightning_hetpipe.capture.profiling import Study
from lightning_hetpipe.capture.rehearsal import measure
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times
from lightning_hetpipe.planning.model.stage_memory import OPTIMIZERS
from lightning_hetpipe.planning.model.timing import ROUNDS
from lightning_hetpipe.planning.plan.profile_cache import ProfileCache
from lightning_hetpipe.strategy.conditions import conditions
from lightning_hetpipe.strategy.progress import Bar, hidden


def profiled(
    study: Study,
    devices: Mapping[str, torch.device],
    model: str,
    precision: str,
    cache: ProfileCache | None,
    bar: Bar = hidden,
) -> Profile:
    """The profile of the layers on ``devices``, of which there is at least one.

    Args:
        study: What the watched step has shown.
        devices: By the name of their type.
        model: For people.
        precision: The Trainer's.
        cache: Where to look for what was measured before, and to put what is measured now; None for nowhere.
        bar: Shows the measuring.
    """
    found: Profile | None = None
    for name, device in devices.items():
        one = kept(study, name, model, precision, cache)
        if one is None:
            one = _measured(study, device, name, model, bar)
            if cache is not None:
                cache.put(conditions(study, name, precision).key(), one)
        found = one if found is None else _joined(found, one)
    assert found is not None
    return found


def _joined(one: Profile, other: Profile) -> Profile:
    """Both devices' times. Kernels may keep other bytes there; a profile has one number for all, the larger."""
    layers = [
        replace(mine, kept=max(mine.kept, theirs.kept)) for mine, theirs in zip(one.layers, other.layers, strict=True)
    ]
    return replace(one, layers=layers).joined(replace(other, layers=layers))


def kept(study: Study, name: str, model: str, precision: str, cache: ProfileCache | None) -> Profile | None:
    """What was measured before on devices of that ``name``, perhaps on another machine; None if nothing was."""
    one = None if cache is None else cache.get(conditions(study, name, precision).key())
    if one is None or name not in one.times or len(one.layers) != len(study.layers):  # a file that somebody has changed
        return None
    return replace(one, model=model, samples=study.samples)


def _measured(study: Study, device: torch.device, name: str, model: str, bar: Bar) -> Profile:
    sizes: list[LayerBytes] = []
    times: list[Times] = []
    with bar(f"measuring on {name}", len(study.layers)) as tick:
        for size, time in study.on(device):
            sizes.append(size)
            times.append(time)
            tick()
    return Profile(model, study.samples, sizes, {name: times}, {})


def layer_seconds(study: Study, device: torch.device, bar: Bar) -> list[float]:
    """How long each layer takes on ``device``, forward and backward: all that cuts for equal devices need."""
    with bar(f"measuring on {device}", (ROUNDS + 1) * len(study.layers)) as tick:
        return measure(study.pieces, study.chance, study.default_dtype, device, tick=tick)


def optimizer_name(optimizer: torch.optim.Optimizer) -> str | None:
    """What the memory model calls ``optimizer``; None if it does not know it."""
    name, options = type(optimizer).__name__.lower(), optimizer.defaults
    if name in ("sgd", "rmsprop") and options.get("momentum"):
        name = f"{name}_momentum"
    if options.get("amsgrad"):
        name = "amsgrad"
    return name if name in OPTIMIZERS else None
