"""Memory model: bytes that a stage takes on its device.

- Weights: the live weights, which Lightning's loop steps.
- Versions: weight stashing keeps copies of trained weights for Nm versions (law L1). Other weight policies keep fewer
  copies, or one more for their predictions. Room for the copies is taken when the pipeline is built. All versions share
  one copy of frozen weights. No copy shares memory with the live weights.
- Gradients of trained weights: of Lightning's last step, which stay until the next step, and of minibatches that wait
  for Lightning's step.
- Optimizer state: bytes for each byte of trained weights, by the optimizer's name (:data:`OPTIMIZERS`). Temporary
  memory of its step is added: on accelerators torch computes all weights of a device at once (``foreach``).
- Activations: what held minibatches keep from their forward until their backward. How many minibatches a stage holds
  follows from the schedule, so a simulation counts them
  (:class:`~lightning_hetpipe.planning.model.simulate.StageLoad`). First in, first out holds more than 1F1B.
- Workspace: temporary memory of computations, estimated as what the largest layer keeps, since its backward makes
  gradients of all that its forward kept. Kernels may take more.
- User code: what ``training_step`` takes on the last stage's device beside the layers: modules that are not pipelined,
  minibatches in flight, and the loss (:class:`~lightning_hetpipe.planning.model.profile.UserBytes`).

The first minibatch of a fit is spread over all devices by their room. It has no versions and takes less, except perhaps
on a device whose later stage has frozen weights. A run with one minibatch in flight has its own memory model
(:class:`SpreadMemory`).

Gradients and activations are counted at the moment at which their sum is largest. If Lightning's thread is slower than
simulated, or evaluates between two steps, more gradients wait. They wait on the host if the device has no room
(:mod:`lightning_hetpipe.pipeline.memory`). Buffers such as BatchNorm's, and what a device holds for the process itself
(a CUDA context, say), do not count.
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
"""Bytes of state for each byte of the weights, which torch.optim keeps in the weights' own dtype."""

STEP = 1
"""Temporary bytes of a step for each byte of the weights, for optimizers that are not in :data:`STEPS`."""

STEPS: Mapping[str, float] = {"sgd": 0, "sgd_momentum": 0, "adadelta": 2, "rprop": 1.25}
"""Temporary bytes of steps that differ from :data:`STEP`, without weight decay (*measured* on the test accelerator)."""

WEIGHT_DECAY = "_weight_decay"
"""Ending of an optimizer's name if its step adds the decay to a copy of the gradients, see :data:`COPIES`."""

COPIES = ("sgd", "nadam", "adadelta", "rmsprop")
"""Optimizers whose steps copy the gradients for weight decay or ``maximize``."""


def plain_name(optimizer: str) -> str:
    """Return the name of the optimizer in :data:`OPTIMIZERS`, without the ending for weight decay."""
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
"""Weight policy that predicts what an optimizer does, by the optimizer's name."""


def planned_policies(optimizer: str | float) -> list[WeightPolicy]:
    """Return the policies to try for an optimizer, in order. The first policy that fits is taken."""
    policy = POLICIES[_PREDICTED.get(plain_name(optimizer), STASH.name)] if isinstance(optimizer, str) else STASH
    return [*dict.fromkeys([policy, STASH])]


def step_bytes(optimizer: str | float) -> float:
    """Return the temporary bytes of a step that :func:`optimizer_state` includes. For a number they are 0."""
    if not isinstance(optimizer, str):
        return 0
    return STEPS.get(plain_name(optimizer), STEP) + optimizer.lower().endswith(WEIGHT_DECAY)


def optimizer_state(optimizer: str | float) -> float:
    """Return the bytes for each byte of the weights, with the step's temporary bytes. A number is returned unchanged.

    Raises:
        SettingError: if ``optimizer`` is neither a name in :data:`OPTIMIZERS` nor such a number.
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
        parameters: Weights.
        kept: What the forward of one minibatch keeps for its backward.
        inputs: Inputs of the stage. With recomputation, only these are kept of a minibatch.
        largest: What the layer that keeps most keeps.
        frozen: Weights that are not trained. ``parameters`` includes them.
    """

    parameters: int
    kept: int
    inputs: int
    largest: int
    frozen: int = 0

    @property
    def trained(self) -> int:
        """Bytes of the trained weights."""
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
    """Return the bytes that ``layer`` keeps besides its input: ``before`` already keeps this input as its output."""
    return max(0, layer.kept - before.output)


@dataclass(frozen=True)
class StageMemory:
    """Bytes that a stage takes, by purpose. The module's docstring describes each purpose.

    ``gradients`` belong to Lightning's last step, ``waiting`` are gradients that wait for the next step. ``optimizer``
    has the state and temporary memory of the step.
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
    """Estimate the memory of a stage with layers of ``sizes``.

    Args:
        loads: What the stage holds at different times. The heaviest load counts.
        state: The optimizer's bytes, see :func:`optimizer_state`.
        recompute: Whether forwards are recomputed for their backwards. Held minibatches that are not computed keep only
            their inputs.
        user: Bytes that user code takes on the device.
        buffers: Copies of the trained weights for versions, by default Nm.
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
    """Memory model of a spread run: what a device holds without a pipeline.

    With one minibatch in flight, no weights are stashed and no gradients wait. A device holds the live weights of its
    layers, the gradients and optimizer state of trained weights, and the minibatch's activations until the backward.
    Later it holds the temporary memory of the optimizer's step in place of activations. For each byte of trained
    weights, ``state`` is the lasting and ``step`` the temporary memory in bytes.
    """

    state: float
    step: float

    @classmethod
    def of(cls, optimizer: str | float) -> SpreadMemory:
        """Make the memory model for ``optimizer``, as :func:`optimizer_state` takes it."""
        step = step_bytes(optimizer)
        return cls(optimizer_state(optimizer) - step, step)

    def stage(self, sizes: Sizes, user: UserBytes | None = None) -> StageMemory:
        """Estimate the device that holds layers of ``sizes`` and, if it is the last device, what ``user`` code takes.

        The workspace is the larger one of the backward's and the step's.
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
