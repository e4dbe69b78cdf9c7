"""CPU time of all threads by folder of the code that spends it."""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

OURS = "lightning_hetpipe"


@cache
def folder_of(file: str) -> str:
    """Return the folder of our package, the other package, or "python", to which code in ``file`` belongs."""
    parts = file.replace("\\", "/").split("/")
    if OURS in parts:
        own = parts[len(parts) - parts[::-1].index(OURS) - 1 : -1]
        return "/".join(own)
    if "site-packages" in parts:
        return parts[parts.index("site-packages") + 1].removesuffix(".py")
    return "benchmarks" if "benchmarks" in parts else "python"


class FolderProfile:
    """Calls and seconds of CPU time by folder, of all threads that begin while it is watching, and of the first one.

    Functions that are not Python count for the folder that calls them, torch's apart: those are the work itself.
    """

    def __init__(self) -> None:
        self._of_threads: list[dict[str, list[float]]] = []
        self._adding = threading.Lock()

    def totals(self) -> dict[str, tuple[float, float]]:
        """Return calls and seconds so far."""
        found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        with self._adding:
            for own in self._of_threads:
                for folder, (calls, seconds) in [*own.items()]:
                    found[folder][0] += calls
                    found[folder][1] += seconds
        return {folder: (calls, seconds) for folder, (calls, seconds) in found.items()}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager: threads that begin within it, and this one, are traced."""
        threading.setprofile(self._begin)
        sys.setprofile(self._tracer())
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _begin(self, frame: FrameType, event: str, argument: Any) -> None:
        """Trace a new thread, from its first event on."""
        tracer = self._tracer()
        sys.setprofile(tracer)
        tracer(frame, event, argument)

    def _tracer(self) -> Any:
        own: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        with self._adding:
            self._of_threads.append(own)
        charged, since = "python", time.thread_time()

        def trace(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal charged, since
            now = time.thread_time()
            own[charged][1] += now - since
            if event == "call":
                charged = folder_of(frame.f_code.co_filename)
                own[charged][0] += 1
            elif event == "return":
                back = frame.f_back
                charged = folder_of(back.f_code.co_filename) if back is not None else "python"
            elif event == "c_call" and (getattr(argument, "__module__", None) or "").startswith("torch"):
                charged = "torch's operators"
            else:
                charged = folder_of(frame.f_code.co_filename)
            since = time.thread_time()

        return trace
