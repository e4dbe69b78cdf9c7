"""Memory model: bytes that a stage takes on its device.

Weights
    The live ones, which Lightning's loop steps.
Versions
    Weight stashing keeps a copy of trained weights for each of Nm versions (law L1), other weight policies fewer, or
    one more for what they predict by; their room is taken when the pipeline is built. Of frozen weights all versions
    share one copy. None of them shares memory with the live weights.
Gradients
    Of trained weights: those of Lightning's last step, which stay until the next one has its own, and those of
    minibatches whose backward is done here and which Lightning's step has not taken yet.
Optimizer state
    By the optimizer's name, in bytes for each byte of the trained weights, see :data:`OPTIMIZERS`; and what its step
    makes for a while: torch's steps on accelerators compute all weights of a device at once (``foreach``).
Activations
    What the minibatches that the stage holds keep from their forward until their backward. How many it holds is a
    matter of the schedule: first in, first out holds more than 1F1B does (DESIGN, section 9), so that a simulation is
    asked (:class:`~lightning_hetpipe.planning.model.simulate.StageLoad`).
Workspace
    What computing takes besides: as much as the layer that keeps most, since its backward makes gradients of what its
    forward has kept. An estimate, as kernels take what they like.

User code
    What ``training_step`` takes beside the layers, on the last stage's device: modules that are not pipelined, the
    minibatches in flight, and the loss (:class:`~lightning_hetpipe.planning.model.profile.UserBytes`).

The first minibatch of a fit, of which there are no versions yet, is spread over all devices by their room, and takes
less; on a device that has the room it may take more than a stage of frozen weights does later. A run with one minibatch
in flight is spread, too (:class:`SpreadMemory`).

Gradients and activations are those of the moment at which they are most together. More gradients than these wait where
Lightning's thread is slower than was simulated, or evaluates between two steps: on the host, where the device has no
room (:mod:`lightning_hetpipe.pipeline.memory`). What a device holds for the process
itself (a CUDA context, say), and buffers such as BatchNorm's, do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model.profile import LayerBytes, UserBytes
from lightning_hetpipe.planning.model.simulate import StageLoad
from lightning_hetpipe.rules.versions import POLICIES, STASH, WeightPolicy

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
    "rmsprop_centered": 2,
    "rmsprop_momentum_centered": 3,
    "rprop": 2,
}
"""Bytes of state for each byte of the weights, as torch.optim keeps it: in the weights' own dtype."""

STEP = 1
"""Bytes that a step makes for each byte of the weights, but for :data:`STEPS`: the root of the second moment, say."""

STEPS: Mapping[str, float] = {"sgd": 0, "sgd_momentum": 0, "adadelta": 2, "rprop": 1.25}
"""Bytes of steps that are not :data:`STEP` (*measured* on the test accelerator), without weight decay."""

WEIGHT_DECAY = "_weight_decay"
"""Ending of an optimizer's name where its step adds the decay to a copy of the gradients, as :data:`COPIES` do."""

COPIES = ("sgd", "nadam", "adadelta", "rmsprop")
"""Optimizers whose steps make a copy of the gradients for weight decay, or ``maximize``."""


def plain_name(optimizer: str) -> str:
    """Name of the optimizer in :data:`OPTIMIZERS`, whatever its weight decay."""
    return optimizer.lower().removesuffix(WEIGHT_DECAY)


_PREDICTED = {
    "sgd_momentum": "spectrain",
    "adam": "xpipe",
    "adamw": "xpipe",
    "amsgrad": "xpipe",
    **dict.fromkeys(
        ("adamax", "muon", "nadam", "radam", "rmsprop_momentum", "rmsprop_momentum_centered", "rprop"), "pipeoptim"
    ),
}
"""Weight policies that predict what an optimizer does, by its name."""


def planned_policies(optimizer: str | float) -> list[WeightPolicy]:
    """Policies for an optimizer by its name in the memory model, of which the first is taken that fits."""
    policy = POLICIES[_PREDICTED.get(plain_name(optimizer), STASH.name)] if isinstance(optimizer, str) else STASH
    return [*dict.fromkeys([policy, STASH])]


def step_bytes(optimizer: str | float) -> float:
    """Bytes that a step makes for a while, of those of :func:`optimizer_state`; of a number none."""
    if not isinstance(optimizer, str):
        return 0
    return STEPS.get(plain_name(optimizer), STEP) + optimizer.lower().endswith(WEIGHT_DECAY)


def optimizer_state(optimizer: str | float) -> float:
    """Bytes for each byte of the weights: of a name in :data:`OPTIMIZERS` and its step, or the number itself.

    Raises:
        SettingError: for what is neither.
    """
    if isinstance(optimizer, str):
        known = OPTIMIZERS.get(plain_name(optimizer))
        if known is None:
            raise SettingError(
                f"optimizer='{optimizer}' is not known; give one of {', '.join(OPTIMIZERS)}, with '{WEIGHT_DECAY}' at"
                f" its end if {', '.join(COPIES[:-1])} or {COPIES[-1]} has one, or its bytes of state for each byte of"
                " the weights"
            )
        return known + step_bytes(optimizer)
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
        frozen: Bytes of those of their weights that are not trained.
    """

    parameters: int
    kept: int
    inputs: int
    largest: int
    frozen: int = 0

    @property
    def trained(self) -> int:
        """Bytes of their trained weights."""
        return self.parameters - self.frozen

    @classmethod
    def of(cls, layers: Sequence[LayerBytes], first: int, last: int) -> Sizes:
        """Add up ``layers[first]`` to ``layers[last]``, both inclusive."""
        own = layers[first : last + 1]
        return cls(
            sum(layer.parameters for layer in own),
            own[0].kept + sum(more(one, other) for one, other in pairwise(own)),
            own[0].given or (layers[first - 1].output if first else 0),
            max(layer.kept for layer in own),
            sum(layer.frozen for layer in own),
        )


def more(before: LayerBytes, layer: LayerBytes) -> int:
    """Bytes that ``layer`` keeps besides what it shares with the one before it: that one's output is its input."""
    return max(0, layer.kept - before.output)


@dataclass(frozen=True)
class StageMemory:
    """Bytes that a stage takes, by what for.

    Attributes:
        weights: The live ones.
        versions: Copies of them.
        gradients: Those of Lightning's last step.
        waiting: Gradients that wait for Lightning's step.
        optimizer: Its state, and what its step makes.
        activations: What forwards keep for backwards.
        workspace: What computing takes.
        user: What user code takes.
    """

    weights: int
    versions: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int
    user: int = 0
    waiting: int = 0

    @property
    def total(self) -> int:
        weights = self.weights + self.versions + self.gradients + self.optimizer
        return weights + self.moving + self.workspace + self.user

    @property
    def moving(self) -> int:
        """Bytes of activations and waiting gradients together."""
        return self.activations + self.waiting

    @property
    def counted(self) -> int:
        """Bytes that the engine counts (``StageReport.memory_bytes``): versions, activations, waiting gradients."""
        return self.versions + self.moving


def stage_memory(
    sizes: Sizes,
    in_flight: int,
    loads: Iterable[StageLoad],
    *,
    state: float = 2.0,
    recompute: bool = False,
    user: int = 0,
    buffers: int | None = None,
) -> StageMemory:
    """Memory of a stage with layers of ``sizes``.

    Args:
        sizes: Those of its layers.
        in_flight: Nm.
        loads: What it holds, at one time or another; the heaviest counts.
        state: The optimizer's, see :func:`optimizer_state`.
        recompute: Whether forwards are computed again for their backwards: a minibatch that is held keeps its inputs
            only, and one of them all.
        user: Bytes that user code takes on its device.
        buffers: Copies of the trained weights that versions take; by default Nm.
    """
    each, once = (sizes.inputs, sizes.kept - sizes.inputs) if recompute else (sizes.kept, 0)
    trained = sizes.trained
    waiting, activations = max(
        ((load.waiting * trained, load.held * each + load.whole * once) for load in loads), key=sum
    )
    versions = (in_flight if buffers is None else buffers) * trained + sizes.frozen
    return StageMemory(
        sizes.parameters,
        versions,
        gradients=trained,
        optimizer=int(state * trained),
        activations=activations,
        workspace=sizes.largest,
        user=user,
        waiting=waiting,
    )


@dataclass(frozen=True)
class SpreadMemory:
    """Memory model of a spread run: what a device holds where there is no pipeline.

    With one minibatch in flight nothing is stashed and nothing waits: a device holds the live weights of its layers, of
    trained ones the gradients and the optimizer's state, and the minibatch's activations until the backward. Later it
    holds, in place of activations, what the optimizer's step makes for a while.

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
