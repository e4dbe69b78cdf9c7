"""Speeds of emulated devices: how long stages on a CPU take, so that they compare as devices that are not here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from lightning_hetpipe.emulation import Pad
from lightning_hetpipe.planning.model.cluster import Cluster, Device
from lightning_hetpipe.planning.model.estimate import StageEstimate
from lightning_hetpipe.planning.model.profile import Profile

SHARE = 1 / 3
"""Share of the CPU's cores that stages may compute on at once: the rest is Lightning's loop's, and the system's."""

LEAST = 2.0
"""Time of the fastest device as a multiple of its layers' time: a stage does more than to compute layers."""

TOLERATED = 0.1
"""Share of an emulated stage's passes that may take longer than they should before a warning."""


def slowed(profile: Profile, cluster: Cluster, cores: int | None = None) -> tuple[Profile, float]:
    """``profile`` as emulated devices are to keep to, and how many times longer that is than it says.

    Seconds that were measured on such a device, or come from those of one, are kept to. Where only this machine's CPU
    was measured, ratios are all there is: the fastest device takes :data:`LEAST` times as long as the CPU, or longer by
    as much as it takes for all of them to fit into its cores.

    Args:
        profile: With times of all devices of ``cluster``.
        cluster: The emulated devices.
        cores: That this process may use; by default counted.
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
    """Tell whether nothing but this machine's CPU was measured."""
    return set(profile.times) - set(profile.estimated) == {"cpu"}


def relative_speeds(profile: Profile, cluster: Cluster) -> list[float]:
    """Speed of each device on the whole model, as a multiple of the CPU's."""
    cpu = sum(each.forward + each.backward for each in profile.times["cpu"])
    whole = [sum(each.forward + each.backward for each in profile.times_on(slot.device)) for slot in cluster.slots]
    return [cpu / each if each else 1.0 for each in whole]


def pads(stages: Sequence[StageEstimate]) -> list[Pad]:
    """Time of each stage: its layers on its device, and transfers to it over the links."""
    return [Pad(s.times.forward + s.times.receive, s.times.backward + s.times.receive_gradient) for s in stages]


def described(profile: Profile, cluster: Cluster, factor: float) -> str:
    """One line on what is emulated, and how fast."""
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
