"""Choice of the stages that have processes of their own: those with graphs of all layers, and without the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_hetpipe.hosts.remote_stage import RemoteStage, reason_to_stay
from lightning_hetpipe.pipeline.stage import Layer, Stage
from lightning_hetpipe.rules.schedule import Segment


class StagesApart:
    """Makes stages, and remembers which stay in this process, and why."""

    def __init__(self) -> None:
        self._apart: list[int] = []
        self._reasons: dict[int, str] = {}

    def make(
        self, index: int, device: torch.device, segments: Sequence[Segment], layers: Sequence[Layer], *args: Any
    ) -> Stage:
        """Make stage ``index``, with the arguments of :class:`~lightning_hetpipe.pipeline.stage.Stage`."""
        own = [layers[number] for segment in segments for number in segment.layers]
        reason = reason_to_stay(own)
        if reason is None:
            self._apart.append(index)
            return RemoteStage(index, device, segments, layers, *args)
        self._reasons[index] = reason
        return Stage(index, device, segments, layers, *args)

    def tell(self) -> None:
        """Say so, once for all virtual workers."""
        text, warns = self.told()
        (rank_zero_warn if warns else rank_zero_info)(f"hetpipe: {text}")

    def told(self) -> tuple[str, bool]:
        """The sentence that says which stages have processes, and whether none has, which is worth a warning."""
        reasons = [f"stage {index} stays in this process, as {reason}" for index, reason in self._reasons.items()]
        if not self._apart:
            why = "; ".join(reasons) or "there is one stage, which has the loss and stays with the user's code"
            return f"stage_hosts='processes' changes nothing: {why}", True
        names = " and ".join(map(str, self._apart))
        each = f"stages {names} have processes of their own" if len(self._apart) > 1 else f"stage {names} has a process"
        return "; ".join([each if len(self._apart) > 1 else f"{each} of its own", *reasons]), False
