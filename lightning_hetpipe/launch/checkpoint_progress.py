"""Progress of a run in its checkpoints, by which the one that it goes on from is chosen.

The newest file need not be the one with the most progress: where virtual worker 0 is lost, one that was late may save
last what it had. So the contents tell, of which nothing but plain values is unpickled.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Progress(NamedTuple):
    """Progress of a run when a checkpoint of it was saved; greater ones are further.

    Attributes:
        epoch: Its epoch; -1 of a file that cannot be read.
        waves: Waves in that epoch; minibatches where there are no waves.
        steps: Optimizer steps in all.
    """

    epoch: int
    waves: float = 0.0
    steps: int = 0


def progress_of(path: str | Path) -> Progress:
    """The progress of the checkpoint at ``path``."""
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as file:
                content: Any = _PlainReader(file).load()
        epoch, loop = content["epoch"], content["loops"]["fit_loop"]
        begun, batches = loop["epoch_progress"]["current"], loop["epoch_loop.batch_progress"]["current"]
        is_between = epoch >= begun["ready"]  # the last epoch is over, and its batches are counted still
        waves = 0.0 if is_between else batches["processed"] / content.get("hetpipe", {}).get("wave", 1)
        return Progress(int(epoch), float(waves), int(content["global_step"]))
    except Exception:  # whatever somebody's plugin has written
        return Progress(-1)


def furthest(paths: Iterable[str]) -> str | None:
    """The one of ``paths`` with the most progress; of equal ones the last, and None where none is there."""
    there = [path for path in paths if os.path.isfile(path)]
    return max(reversed(there), key=progress_of, default=None)


class _PlainReader(pickle.Unpickler):
    """Unpickles numbers, strings, and lists and dicts of them; others have stand-ins, and no code of theirs runs."""

    def find_class(self, module: str, name: str) -> Any:
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else _Placeholder

    def persistent_load(self, pid: Any) -> Any:
        return _Placeholder()


class _Placeholder:
    """Takes the place of any object, and takes anything that unpickling does with one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _ignore(self, *_: Any) -> None:
        pass

    __call__ = __setstate__ = __setitem__ = append = extend = add = _ignore
