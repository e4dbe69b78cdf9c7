"""Memory model of spread runs: the bytes that a device holds when there is no pipeline.

With one minibatch in flight nothing is stashed and nothing waits: a device holds the live weights of its layers, of
trained ones the gradients and the optimizer's state, and the minibatch's activations until the backward; later, in
place of activations, what the optimizer's step makes for a while.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hetpipe.planning.model.profile import UserBytes
from lightning_hetpipe.planning.model.stage_memory import Sizes, StageMemory, optimizer_state, step_bytes


@dataclass(frozen=True)
class SpreadMemory:
    """Memory model of a spread run.

    Attributes:
        state: The optimizer's bytes for each byte of the trained weights, from one step to the next.
        step: Bytes that its step makes for a while, for each byte of the trained weights.
    """

    state: float
    step: float

    @classmethod
    def of(cls, optimizer: str | float) -> SpreadMemory:
        """Memory model for ``optimizer``, as :func:`optimizer_state` takes it."""
        step = step_bytes(optimizer)
        return cls(optimizer_state(optimizer) - step, step)

    def stage(self, sizes: Sizes, user: UserBytes | None = None) -> StageMemory:
        """Memory of the device that holds layers of ``sizes`` and, if it is the last, what ``user`` code takes.

        The workspace is that of the backward or of the step, whichever is more.
        """
        user = user or UserBytes()
        trained = sizes.trained + user.trained
        passing = user.kept + 2 * user.loss
        workspace = max(sizes.largest, int(self.step * trained) - sizes.kept - passing)
        return StageMemory(
            weights=sizes.parameters + user.trained + user.frozen,
            versions=0,
            gradients=trained,
            optimizer=int(self.state * trained),
            activations=sizes.kept,
            workspace=workspace,
            user=user.batch + passing,
        )
