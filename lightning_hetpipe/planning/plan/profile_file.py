"""Profiles as JSON files (schema in ``docs/planning.md``), and a cache, so that a model is measured once."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, cast

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model import cluster
from lightning_hetpipe.planning.model.profile import Layer, LayerBytes, LayerWidths, Profile, Times, UserBytes, Width
from lightning_hetpipe.planning.plan.json_file import plain, read, write
from lightning_hetpipe.settings import Bounds, Length, Reads, Size, is_positive

VERSION = 1


@dataclass(frozen=True)
class DeviceTimes:
    layers: tuple[Times, ...]
    memory_bytes: Annotated[int, Bounds(cluster.LEAST_MEMORY), "bytes of a device, 1 MiB or more"] | None = None
    flop_per_s: Annotated[float, Bounds(0), is_positive, "positive"] | None = None


@dataclass(frozen=True)
class LayerParts:
    layer: Layer
    run: Layer
    units: Mapping[str, Size] = field(default_factory=dict)
    sums: bool = False
    devices: Mapping[str, Annotated[Sequence[Width], "a list of times"]] = field(default_factory=dict)


@dataclass(frozen=True)
class ProfileFile:
    """Content of a profile's file."""

    model: str
    samples: Size
    layers: Annotated[tuple[LayerBytes, ...], Length(1), "a list of at least one layer"]
    devices: Annotated[Mapping[str, DeviceTimes], Length(1), "a mapping with the times of at least one device"]
    estimated: Mapping[str, Annotated[str, "text"]] = field(default_factory=dict)
    calls: tuple[Annotated[tuple[Layer, Layer], "two layers: the first one, and the one behind the last"], ...] = ()
    user_code: UserBytes = field(default_factory=UserBytes)
    widths: tuple[LayerParts, ...] = ()

    @classmethod
    def of(cls, profile: Profile) -> ProfileFile:
        devices = {
            name: DeviceTimes(tuple(times), profile.memory.get(name), profile.speeds.get(name))
            for name, times in profile.times.items()
        }
        widths = tuple(LayerParts(layer, w.run, w.units, w.sums, w.measured) for layer, w in profile.widths.items())
        return cls(
            model=profile.model,
            samples=profile.samples,
            layers=tuple(profile.layers),
            devices=devices,
            estimated=profile.estimated,
            calls=tuple(profile.calls),
            user_code=profile.user,
            widths=widths,
        )

    def profile(self, _: str = "") -> Profile:
        return Profile(
            model=self.model,
            samples=self.samples,
            layers=self.layers,
            times={name: each.layers for name, each in self.devices.items()},
            memory={name: each.memory_bytes for name, each in self.devices.items() if each.memory_bytes is not None},
            estimated=self.estimated,
            calls=self.calls,
            user=self.user_code,
            speeds={name: each.flop_per_s for name, each in self.devices.items() if each.flop_per_s is not None},
            widths={each.layer: LayerWidths(each.run, each.units, each.sums, each.devices) for each in self.widths},
        )


PROFILE = Annotated[ProfileFile, Reads(ProfileFile.profile)]


def save(profile: Profile, path: str | PathLike[str]) -> None:
    """Write ``profile``, whole or not at all.

    Raises:
        OSError: if it cannot be written.
    """
    write(path, {"schema_version": VERSION, **plain(ProfileFile.of(profile))})


def load(path: str | PathLike[str]) -> Profile:
    """Read a file of :func:`save`, or profile.json in a folder.

    Raises:
        SettingError: one sentence with the file, the key and the fault.
    """
    file = Path(path)
    return cast(Profile, read(file / "profile.json" if file.is_dir() else file, PROFILE, VERSION))


def key_of(conditions: Mapping[str, Any]) -> str:
    """Return a file name that is equal for equal conditions of measuring, in any process and on any machine."""
    text = json.dumps(conditions, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:40]


class ProfileCache:
    """Cache with one file per key in ``folder``, by default :func:`cache_folder`. Several processes may use it."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = cache_folder(os.environ, sys.platform) if folder is None else Path(folder)

    def get(self, key: str) -> Profile | None:
        """Return the cached profile, or None if there is none or it cannot be read."""
        try:
            return load(self._file(key))
        except SettingError:
            return None

    def put(self, key: str, profile: Profile) -> None:
        """Cache ``profile``. If the folder cannot be written, nothing is cached."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            save(profile, self._file(key))

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def cache_folder(environment: Mapping[str, str], platform: str) -> Path:
    """Return HETPIPE_CACHE, or a folder in XDG_CACHE_HOME, or a folder in the cache of ``sys.platform``."""
    if own := environment.get("HETPIPE_CACHE"):
        return Path(own).expanduser() / "profiles"
    if platform == "win32":
        fallback = environment.get("LOCALAPPDATA") or "~/AppData/Local"
    else:
        fallback = "~/Library/Caches" if platform == "darwin" else "~/.cache"
    caches = environment.get("XDG_CACHE_HOME") or fallback
    return Path(caches).expanduser() / "lightning_hetpipe" / "profiles"
