"""Profiles on disk, so that a model is measured once on each type of device."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model.profile import Profile
from lightning_hetpipe.planning.plan.profile_file import load, save


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
