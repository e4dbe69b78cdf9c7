"""Speeds of emulated devices: how long stages on a CPU take, so that they compare like devices that are not here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from lightning_hetpipe.emulation import Pad
from lightning_hetpipe.planning.model.cluster import Cluster, Device
from lightning_hetpipe.planning.model.estimate import StageEstimate
from lightning_hetpipe.planning.model.profile import Profile

SHARE = 1 / 3
"""Fraction of the CPU's cores on which stages may compute at once. Lightning's loop and the system need the rest."""

LEAST = 2.0
"""Time of the fastest device relative to its layers' time on the CPU: a stage does more than compute layers."""

TOLERATED = 0.1
"""Fraction of an emulated stage's passes that may take too long before a warning."""


def slowed(profile: Profile, cluster: Cluster, cores: int | None = None) -> tuple[Profile, float]:
    """Return the profile that emulated devices follow, and the factor by which its times are longer than ``profile``.

    Measured seconds of an emulated device, or seconds derived from them, are kept. If only this machine's CPU was
    measured, only ratios are known: the fastest device then takes at least :data:`LEAST` times as long as the CPU. It
    takes longer if all devices together need more than the CPU's ``cores`` (by default counted).
    """
    if not _knows_ratios_only(profile):
        return profile, 1.0
    if cores is None:
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
    kinds = [_kind(slot.device) for slot in cluster.slots]
    speeds = dict(zip(kinds, relative_speeds(profile, cluster), strict=True))
    each = ", ".join(f"{name} {factor / speed:.2g}" for name, speed in speeds.items())
    return (
        f"the devices are emulated on this CPU, and take as many times as long as it does: {each}; only their ratios"
        " mean something, and links, which are not slowed down, look faster next to them than they are"
    )


def _kind(device: Device) -> str:
    return device.name if device.speed == 1.0 else f"{device.name} of speed {device.speed:g}"
