"""The machine a benchmark runs on: which two cores it takes, and what to print about it."""

import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path


def two_cores() -> tuple[int, ...]:
    """Returns two CPUs that share no core, to pin every variant to; () where that cannot be done or is not needed.

    Without it a machine with more cores would lend some variants (Lightning's thread beside the stages) a third one.
    """
    if not hasattr(os, "sched_setaffinity"):
        return ()
    first_of_core: dict[tuple[str, ...], int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        first_of_core.setdefault(_core(cpu), cpu)
    return tuple(first_of_core.values())[:2] if len(first_of_core) > 1 else ()


def _core(cpu: int) -> tuple[str, ...]:
    folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return tuple((folder / name).read_text() for name in ("physical_package_id", "core_id"))
    except OSError:
        return (str(cpu),)


def describe_machine(cores: Sequence[int]) -> dict[str, object]:
    """Describe the machine, to judge figures by; `cores` are the CPUs that the variants were pinned to."""
    return {
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "cores_used": f"CPUs {' and '.join(map(str, cores))}" if cores else "not pinned to cores",
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": version("torch"),
        "lightning": version("lightning"),
    }


def provenance(machine: Mapping[str, object], rounds: int) -> str:
    """Two lines of a report, from what `describe_machine` gave: on what, and how its figures were formed."""
    return (
        f"on {machine['cpu']}, {machine['cores_used']}; torch {machine['torch']}, lightning {machine['lightning']}\n"
        f"load average at the start {machine['load_average']}; medians and ranges over {rounds} round(s)"
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
