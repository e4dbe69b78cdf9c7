"""Catalogue of common GPUs by their data sheets, for plans of hardware that is not at hand.

The table with its sources is ``gpus.json``. All numbers that follow from it are *estimates*, and are shown as such.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Annotated

from lightning_hetpipe.settings import Choices, check

INTENSITY = 16.0
"""FLOP for each byte of device memory traffic in the workload that :func:`speed_by` supposes."""

PRECISIONS = ("32", "32-highest", "16")
"""Names of precisions: 32 bits with TF32 if the GPU has it, 32 bits without TF32, 16 bits."""

_VENDORS = {"nvidia", "geforce", "tesla", "amd", "radeon", "instinct"}

CONTEXT = 512 << 20
"""Bytes of a GPU that the driver, the CUDA context and the libraries of a process take. An estimate."""

FRAGMENTED = 0.05
"""Fraction of a device's memory that its allocator cannot give away because it lies in small pieces. An estimate."""


def fragmented(memory: int) -> int:
    """Return the bytes of ``memory`` that tensors can take despite fragmentation."""
    return int((1 - FRAGMENTED) * memory)


@dataclass(frozen=True)
class Gpu:
    """Data sheet of a GPU.

    Attributes:
        memory: Nominal bytes. Tensors can take :attr:`usable` bytes of them.
        fp32: Peak FLOP/s in 32 bits, without tensor cores.
        tf32: Peak dense FLOP/s of tensor cores in TF32, or None without such cores.
        half: Peak dense FLOP/s in 16 bits (bfloat16 if the GPU has it, else float16). None if not faster.
        bandwidth: Memory bandwidth in bytes/s.
        aliases: Other names. Names from ``torch.cuda.get_device_name`` are understood without an alias.
    """

    name: str
    memory: int
    fp32: float
    tf32: float | None
    half: float | None
    bandwidth: float
    source: str
    aliases: tuple[str, ...]

    @property
    def usable(self) -> int:
        """Bytes that tensors can take, without a process's context and what fragmentation loses."""
        return fragmented(self.memory - CONTEXT)

    def speed(self, precision: str = "32") -> float:
        """Estimate FLOP/s in ``precision`` on work that computes and moves bytes in turns, by :func:`speed_by`.

        Raises:
            SettingError: if ``precision`` is not one of :data:`PRECISIONS`.
        """
        check("precision", precision, Annotated[str, Choices(PRECISIONS)])
        peaks = dict(zip(PRECISIONS, (self.tf32, None, self.half), strict=True))
        return speed_by(peaks[precision] or self.fp32, self.bandwidth)


def speed_by(peak: float, bandwidth: float) -> float:
    """Estimate FLOP/s on work of :data:`INTENSITY` that computes at ``peak`` FLOP/s and moves ``bandwidth`` bytes/s in
    turns.

    The rule adds the two times of a roofline. It was compared with the layer times of OPT-350M that the Sailor project
    measured on seven GPUs. Over all pairs of GPUs, the ratio of two speeds is off by a factor of 1.08 on average, and
    of 1.19 at worst. The intensity was chosen on these measurements.
    """
    return 1 / (1 / peak + 1 / (INTENSITY * bandwidth))


def nearest_gpu(name: str, names: Iterable[str]) -> str:
    """Return the end of an error that suggests the closest of ``names``, or an empty string.

    A name with the same number is closer than any other name: "1080ti" means a GTX 1080 Ti, not an H100. If two names
    mean one GPU, the later name is suggested.
    """
    keys = {_key(each): each for each in names}
    numbers = set(re.findall(r"\d{2,}", name))
    alike = [key for key, each in keys.items() if numbers.intersection(re.findall(r"\d{2,}", each))]
    found = difflib.get_close_matches(_key(name), alike, n=1, cutoff=0.3) or difflib.get_close_matches(
        _key(name), list(keys), n=1, cutoff=0.8 if numbers else 0.6
    )
    return f"; did you mean '{keys[found[0]]}'?" if found else ""


def known(name: str) -> Gpu | None:
    """Return the GPU named ``name``, or None if the catalogue has no such GPU.

    Other spellings are understood: "TITAN RTX", "NVIDIA GeForce RTX 3090".
    """
    return _by_key().get(_key(name))


def canonical(name: str) -> str:
    """Return the catalogue's spelling of ``name``, so that spellings compare equal. An unknown name stays unchanged."""
    gpu = known(name)
    return name if gpu is None else gpu.name


@cache
def gpus() -> Mapping[str, Gpu]:
    """Return all GPUs of the catalogue, by name."""
    table = json.loads(files("lightning_hetpipe.planning.model").joinpath("gpus.json").read_text(encoding="utf-8"))
    return {
        row["name"]: Gpu(
            row["name"],
            memory=row["memory"] << 30,
            fp32=row["fp32"] * 1e12,
            tf32=row["tf32"] and row["tf32"] * 1e12,
            half=row["half"] and row["half"] * 1e12,
            bandwidth=row["bandwidth"] * 1e9,
            source=table["sources"][row["source"]],
            aliases=tuple(row["aliases"]),
        )
        for row in table["gpus"]
    }


@cache
def _by_key() -> Mapping[str, Gpu]:
    return {_key(name): gpu for gpu in gpus().values() for name in (gpu.name, *gpu.aliases)}


def _key(name: str) -> str:
    """Reduce a name to letters and digits, without the maker's names."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "".join(word for word in words if word not in _VENDORS)
