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
(:meth:`StageBytes.spread`).

Gradients and activations are counted at the moment at which their sum is largest. If Lightning's thread is slower than
simulated, or evaluates between two steps, more gradients wait. They wait on the host if the device has no room
(:mod:`lightning_hetpipe.pipeline.memory`). Buffers such as BatchNorm's, and what a device holds for the process itself
(a CUDA context, say), do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model.costs import Floats, between
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


class StageBytes:
    """Bytes of the stages that may lie between any two boundaries of ``layers``.

    Boundaries are numbered as in :mod:`~lightning_hetpipe.planning.model.costs`.

    Args:
        optimizer: As :func:`optimizer_state` takes it.
        recompute: Whether forwards are recomputed for their backwards. Held minibatches that are not computed keep only
            the inputs of the stage.

    Attributes:
        state: The optimizer's bytes for each byte of the trained weights.
    """

    def __init__(self, layers: Sequence[LayerBytes], optimizer: str | float = "adam", recompute: bool = False) -> None:
        outside = np.tri(len(layers) + 1, dtype=bool)

        def within(values: Sequence[float]) -> Floats:
            return np.where(outside, 0.0, between(values))

        added = np.array([0.0, *(more(*pair) for pair in pairwise(layers)), 0.0])
        own = np.array([*(layer.kept for layer in layers), 0.0])
        ends = np.where(outside[:, 1:], 0.0, np.broadcast_to(own[:-1], (len(own), len(layers))))
        outputs = [0, *(layer.output for layer in layers[:-1])]
        given = [layer.given or before for layer, before in zip(layers, outputs, strict=True)]
        inputs = np.array([*given, 0.0])[:, None] + np.zeros(len(own))
        self._trained = within([layer.parameters - layer.frozen for layer in layers])
        self._frozen = within([layer.frozen for layer in layers])
        self._kept: Floats = np.where(outside, 0.0, between(added[:-1].tolist()) + (own - added)[:, None])
        self._largest = np.pad(np.maximum.accumulate(ends, axis=1), ((0, 0), (1, 0)))
        # What the stage keeps of each held minibatch, and what of the computed one besides.
        self._each = inputs if recompute else self._kept
        self._once = self._kept - self._each
        self.state, self._step = optimizer_state(optimizer), step_bytes(optimizer)
        self._fixed = 2 * (self._trained + self._frozen) + np.floor(self.state * self._trained) + self._largest

    def totals(self, loads: Iterable[StageLoad], copies: int) -> Floats:
        """Return the bytes of all stages, for the heaviest of ``loads``, without user code.

        ``copies`` is as for :meth:`stage`. The result is by first and last boundary.
        """
        heaviest = np.zeros_like(self._fixed)
        for load in loads:
            found = load.waiting * self._trained + load.held * self._each + load.whole * self._once
            np.maximum(heaviest, found, out=heaviest)
        total: Floats = self._fixed + copies * self._trained + heaviest
        return total

    def stage(self, first: int, end: int, load: StageLoad, copies: int, user: int = 0) -> StageMemory:
        """Estimate the memory of the stage from boundary ``first`` to boundary ``end`` while it holds ``load``.

        Args:
            copies: Copies of the trained weights for versions.
            user: Bytes that user code takes on the device.
        """
        trained, frozen = int(self._trained[first, end]), int(self._frozen[first, end])
        return StageMemory(
            weights=trained + frozen,
            versions=copies * trained + frozen,
            gradients=trained,
            optimizer=int(self.state * trained),
            activations=load.held * int(self._each[first, end]) + load.whole * int(self._once[first, end]),
            workspace=int(self._largest[first, end]),
            user=user,
            waiting=load.waiting * trained,
        )

    def spread(self, first: int, end: int, user: UserBytes | None = None) -> StageMemory:
        """Estimate a device of a spread run: what it holds of the layers between two boundaries without a pipeline.

        With one minibatch in flight, no weights are stashed and no gradients wait. A device holds the live weights of
        its layers, the gradients and optimizer state of trained weights, and the minibatch's activations until the
        backward. Later it holds the temporary memory of the optimizer's step in place of activations. So the workspace
        is the larger one of the backward's and the step's. The last device holds what ``user`` code takes.
        """
        user = user or UserBytes()
        kept, passing = int(self._kept[first, end]), user.kept + 2 * user.loss
        trained = int(self._trained[first, end]) + user.trained
        return StageMemory(
            weights=trained + int(self._frozen[first, end]) + user.frozen,
            versions=0,
            gradients=trained,
            optimizer=int((self.state - self._step) * trained),
            activations=kept,
            workspace=max(int(self._largest[first, end]), int(self._step * trained) - kept - passing),
            user=user.batch + passing,
        )
