"""Profiles as JSON files, with the schema of ``docs/planning.md``, and a cache, so that a model is measured once."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model import cluster
from lightning_hetpipe.planning.model.profile import LayerBytes, LayerWidths, Profile, Times, UserBytes, Width
from lightning_hetpipe.planning.plan.json_file import Document, write

VERSION = 1


def save(profile: Profile, path: str | PathLike[str]) -> None:
    """Write ``profile``, whole or not at all.

    Raises:
        OSError: if it cannot be written.
    """
    write(path, as_json(profile))


def load(path: str | PathLike[str]) -> Profile:
    """Read a file that :func:`save` has written, or the file profile.json of a folder.

    Raises:
        SettingError: one sentence with the file, the key and what is wrong there.
    """
    file = Path(path)
    return _read(Document.read(file / "profile.json" if file.is_dir() else file))


def as_json(profile: Profile) -> dict[str, Any]:
    """JSON value that ``save`` writes."""
    return {
        "schema_version": VERSION,
        "model": profile.model,
        "samples": profile.samples,
        "layers": [
            {
                "name": layer.name,
                "parameter_bytes": layer.parameters,
                "kept_bytes": layer.kept,
                "output_bytes": layer.output,
                **({"input_bytes": layer.given} if layer.given else {}),
                **({"changes_buffers": True} if layer.changes_buffers else {}),
                **({"frozen_bytes": layer.frozen} if layer.frozen else {}),
            }
            for layer in profile.layers
        ],
        "devices": {
            name: {
                **({"memory_bytes": profile.memory[name]} if name in profile.memory else {}),
                **({"flop_per_s": profile.speeds[name]} if name in profile.speeds else {}),
                "layers": [*map(_times_json, times)],
            }
            for name, times in profile.times.items()
        },
        "estimated": dict(profile.estimated),
        **({"calls": [list(call) for call in profile.calls]} if profile.calls else {}),
        **(
            {"user_code": {f"{name}_bytes": size for name, size in asdict(profile.user).items()}}
            if profile.user != UserBytes()
            else {}
        ),
        **({"widths": [_widths_json(*each) for each in profile.widths.items()]} if profile.widths else {}),
    }


def _widths_json(layer: int, widths: LayerWidths) -> dict[str, Any]:
    """JSON value of how a layer is divided."""
    measured = {
        name: [{"part": each.part, **_times_json(each.times)} for each in own] for name, own in widths.measured.items()
    }
    found: dict[str, Any] = {"layer": layer, "run": widths.run}
    found |= {"units": dict(widths.units)} if widths.units else {}
    return found | ({"sums": True} if widths.sums else {}) | ({"devices": measured} if measured else {})


def _times_json(times: Times) -> dict[str, float]:
    return {"forward_s": times.forward, "backward_s": times.backward, "update_s": times.update}


def _read(document: Document) -> Profile:
    document.version(VERSION)
    document.object(
        "schema_version", "model", "samples", "layers", "devices", "estimated", "calls", "user_code", "widths"
    )
    estimated = {name: base.text() for name, base in document["estimated"].items()} if "estimated" in document else {}
    layers = [_layer(each) for each in document["layers"].entries()]
    if not layers:
        document["layers"].refuse("is empty; a profile has at least one layer")
    times, memory, speeds = {}, {}, {}
    for name, device in document["devices"].items():
        device.object("memory_bytes", "flop_per_s", "layers")
        times[name] = [_times(each) for each in device["layers"].entries()]
        if len(times[name]) != len(layers):
            device["layers"].refuse(f"has {len(times[name])} entries, for {len(layers)} layers")
        if "memory_bytes" in device:
            memory[name] = device["memory_bytes"].whole(1)
            if memory[name] < cluster.LEAST_MEMORY:
                device["memory_bytes"].refuse(f"is {memory[name]} bytes, less than any device has; give bytes")
        if "flop_per_s" in device:
            speeds[name] = device["flop_per_s"].number()
            if not speeds[name]:
                device["flop_per_s"].refuse("is 0 and must be positive")
    if not times:
        document["devices"].refuse("is empty; a profile has the times of at least one device")
    samples = document["samples"].whole(1)
    calls = [_call(each) for each in document["calls"].entries()] if "calls" in document else []
    user = _user(document["user_code"]) if "user_code" in document else UserBytes()
    widths = dict(_widths(each, len(layers)) for each in document["widths"].entries()) if "widths" in document else {}
    return Profile(document["model"].text(), samples, layers, times, memory, estimated, calls, user, speeds, widths)


def _widths(entry: Document, layers: int) -> tuple[int, LayerWidths]:
    entry.object("layer", "run", "units", "sums", "devices")
    layer, run = entry["layer"].whole(), entry["run"].whole()
    for key in ("layer", "run"):
        if entry[key].whole() >= layers:
            entry[key].refuse(f"is {entry[key].whole()}, and the profile has {layers} layers")
    units = {name: each.whole(1) for name, each in entry["units"].items()} if "units" in entry else {}
    devices = entry["devices"].items() if "devices" in entry else ()
    measured = {name: [_width(each) for each in own.entries()] for name, own in devices}
    return layer, LayerWidths(run, units, "sums" in entry and entry["sums"].truth(), measured)


def _width(entry: Document) -> Width:
    entry.object("part", "forward_s", "backward_s", "update_s")
    part = entry["part"].number()
    if not 0 < part <= 1:
        entry["part"].refuse(f"is {part:g}, and must be more than 0 and at most 1")
    return Width(part, _seconds(entry))


def _layer(entry: Document) -> LayerBytes:
    counted = ("parameter_bytes", "kept_bytes", "output_bytes")
    entry.object("name", *counted, "input_bytes", "changes_buffers", "frozen_bytes")
    given = entry["input_bytes"].whole() if "input_bytes" in entry else 0
    changes = entry["changes_buffers"].truth() if "changes_buffers" in entry else False
    parameters, kept, output = (entry[key].whole() for key in counted)
    frozen = entry["frozen_bytes"].whole() if "frozen_bytes" in entry else 0
    if frozen > parameters:
        entry["frozen_bytes"].refuse(f"is {frozen}, more than parameter_bytes, which is {parameters}")
    return LayerBytes(entry["name"].text(), parameters, kept, output, given, changes, frozen)


def _user(entry: Document) -> UserBytes:
    names = {field.name: f"{field.name}_bytes" for field in fields(UserBytes)}
    entry.object(*names.values())
    return UserBytes(**{name: entry[key].whole() for name, key in names.items() if key in entry})


def _call(entry: Document) -> tuple[int, int]:
    layers = entry.entries()
    if len(layers) != 2:
        entry.refuse(f"has {len(layers)} entries, and must have two: the first layer, and the one behind the last")
    return layers[0].whole(), layers[1].whole()


def _times(entry: Document) -> Times:
    entry.object("forward_s", "backward_s", "update_s")
    return _seconds(entry)


def _seconds(entry: Document) -> Times:
    update = entry["update_s"].number() if "update_s" in entry else 0.0
    return Times(entry["forward_s"].number(), entry["backward_s"].number(), update)


@dataclass(frozen=True)
class Conditions:
    """Conditions that a profile on one device depends on: where one of these differs, another is measured.

    Attributes:
        layers: In order, the name of each and a text that changes with what it computes: its graph, or its code.
        parameters: Name, shape and dtype of each parameter.
        inputs: Shape and dtype of each tensor of a minibatch.
        precision: The Trainer's.
        torch: Its version.
        device: Its name, such as "RTX-3090".
        settings: Whatever else was set: torch's threads, TF32, ...
    """

    layers: Sequence[tuple[str, str]]
    parameters: Sequence[tuple[str, Sequence[int], str]]
    inputs: Sequence[tuple[Sequence[int], str]]
    precision: str
    torch: str
    device: str
    settings: Mapping[str, str]

    def key(self) -> str:
        """File name: the same for equal conditions, in any process and on any machine."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:40]


class ProfileCache:
    """One file for each key, in ``folder``; any number of processes may read and write at once.

    Args:
        folder: By default :func:`cache_folder`. It is made when something is put there.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = cache_folder(os.environ, sys.platform) if folder is None else Path(folder)

    def get(self, key: str) -> Profile | None:
        """Kept profile; None if there is none, or if it cannot be read, in which case it may be put again."""
        try:
            return load(self._file(key))
        except SettingError:
            return None

    def put(self, key: str, profile: Profile) -> None:
        """Keep ``profile`` instead of what was there; a folder that cannot be written keeps nothing."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            save(profile, self._file(key))

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def cache_folder(environment: Mapping[str, str], platform: str) -> Path:
    """HETPIPE_CACHE, else a folder of ours in XDG_CACHE_HOME, else in the ``platform``'s own (``sys.platform``)."""
    if own := environment.get("HETPIPE_CACHE"):
        return Path(own).expanduser() / "profiles"
    if platform == "win32":
        fallback = environment.get("LOCALAPPDATA") or "~/AppData/Local"
    else:
        fallback = "~/Library/Caches" if platform == "darwin" else "~/.cache"
    caches = environment.get("XDG_CACHE_HOME") or fallback
    return Path(caches).expanduser() / "lightning_hetpipe" / "profiles"
