"""Notes on errors for want of memory: who had asked for it, what was held there, and what helps."""

from __future__ import annotations

import torch

_BEGIN = "HetPipeStrategy: "


def explain(error: torch.OutOfMemoryError, text: str) -> None:
    """Add a note with ``text`` to ``error``, unless it has such a note already."""
    if not any(note.startswith(_BEGIN) for note in getattr(error, "__notes__", ())):
        error.add_note(f"{_BEGIN}{text}")


def less(in_flight: int, recompute: bool) -> str:
    """Say how stages take less memory, as the end of a sentence.

    Args:
        in_flight: Nm of the run.
        recompute: Whether forwards are computed again for their backwards already.
    """
    ways = [f"in_flight below {in_flight}"] if in_flight > 1 else []
    ways += [] if recompute else ["recompute=True"]
    ways.append("smaller batches" if not ways else "or smaller batches")
    return f"set {', '.join(ways)}, or give more devices, or ones with more memory"
