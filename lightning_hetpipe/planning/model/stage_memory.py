"""Memory model: bytes that a stage takes on its device.

Weights
    The live ones, which Lightning's loop steps.
Versions
    Weight stashing keeps a copy for each of Nm versions (law L1); their room is taken when the pipeline is built. None
    of them shares memory with the live weights.
Gradients
    Those of Lightning's last step, which stay until the next one has its own, and those of minibatches whose backward
    is done here and which Lightning's step has not taken yet.
Optimizer state
    By the optimizer's name, in bytes for each byte of the weights, see :data:`OPTIMIZERS`.
Activations
    What the minibatches that the stage holds keep from their forward until their backward. How many it holds is a
    matter of the schedule: first in, first out holds more than 1F1B does (DESIGN, section 9), so that a simulation is
    asked (:class:`~lightning_hetpipe.planning.model.simulate.StageLoad`).
Workspace
    What computing takes besides: as much as the layer that keeps most, since its backward makes gradients of what its
    forward has kept. An estimate, as kernels take what they like.

The first minibatch of a fit, of which there are no versions yet, is spread over all devices, and takes less.

Gradients and activations are those of the moment at which they are most together. What a device holds for the process
itself (a CUDA context, say), and buffers such as BatchNorm's, do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model.profile import LayerBytes
from lightning_hetpipe.planning.model.simulate import StageLoad

OPTIMIZERS: Mapping[str, float] = {
    "sgd": 0,
    "sgd_momentum": 1,
    "adagrad": 1,
    "adadelta": 2,
    "adafactor": 0,  # rows and columns instead of the whole
    "adam": 2,
    "adamw": 2,
    "adamax": 2,
    "amsgrad": 3,
    "asgd": 1,
    "muon": 1,
    "nadam": 2,
    "radam": 2,
    "rmsprop": 1,
    "rmsprop_momentum": 2,
    "rprop": 2,
}
"""Bytes of state for each byte of the weights, as torch.optim keeps it: in the weights' own dtype."""


def optimizer_state(optimizer: str | float) -> float:
    """Bytes of state for each byte of the weights: of a name in :data:`OPTIMIZERS`, or the number itself.

    Raises:
        SettingError: for what is neither.
    """
    if isinstance(optimizer, str):
        known = OPTIMIZERS.get(optimizer.lower())
        if known is None:
            raise SettingError(
                f"optimizer='{optimizer}' is not known; give one of {', '.join(OPTIMIZERS)}, or its"
                " bytes of state for each byte of the weights"
            )
        return known
    if not 0 <= optimizer < float("inf"):
        raise SettingError(f"optimizer={optimizer!r} must be the bytes of state for each byte of the weights")
    return optimizer


@dataclass(frozen=True)
class Sizes:
    """Bytes of the layers of one stage.

    Attributes:
        parameters: Bytes of their weights.
        kept: Bytes that one minibatch's forward keeps for its backward.
        inputs: Bytes of the stage's inputs, all that is kept of a minibatch where its forward is computed again.
        largest: Bytes that the layer keeps that keeps most.
    """

    parameters: int
    kept: int
    inputs: int
    largest: int

    @classmethod
    def of(cls, layers: Sequence[LayerBytes], first: int, last: int) -> Sizes:
        """Add up ``layers[first]`` to ``layers[last]``, both inclusive."""
        own = layers[first : last + 1]
        return cls(
            sum(layer.parameters for layer in own),
            own[0].kept + sum(more(one, other) for one, other in pairwise(own)),
            own[0].given or (layers[first - 1].output if first else 0),
            max(layer.kept for layer in own),
        )


def more(before: LayerBytes, layer: LayerBytes) -> int:
    """Bytes that ``layer`` keeps besides what it shares with the one before it: that one's output is its input."""
    return max(0, layer.kept - before.output)


@dataclass(frozen=True)
class StageMemory:
    """Bytes that a stage takes, by what for."""

    weights: int
    versions: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.versions + self.gradients + self.optimizer + self.activations + self.workspace

    @property
    def counted(self) -> int:
        """Bytes that the engine counts (``StageReport.memory_bytes``): versions, activations, waiting gradients."""
        return self.versions + self.activations + self.gradients - self.weights


def stage_memory(
    sizes: Sizes, in_flight: int, loads: Iterable[StageLoad], *, state: float = 2.0, recompute: bool = False
) -> StageMemory:
    """Memory of a stage with layers of ``sizes``.

    Args:
        sizes: Those of its layers.
        in_flight: Nm.
        loads: What it holds, at one time or another; the heaviest counts.
        state: The optimizer's, see :func:`optimizer_state`.
        recompute: Whether forwards are computed again for their backwards: a minibatch that is held keeps its inputs
            only, and one of them all.
    """
    each, once = (sizes.inputs, sizes.kept - sizes.inputs) if recompute else (sizes.kept, 0)
    weights = sizes.parameters
    gradients, activations = max(
        (((1 + load.waiting) * weights, load.held * each + load.whole * once) for load in loads), key=sum
    )
    return StageMemory(weights, in_flight * weights, gradients, int(state * weights), activations, sizes.largest)
