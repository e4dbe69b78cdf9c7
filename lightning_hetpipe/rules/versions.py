"""Weight policies: the weights that a minibatch uses (law L1), and how long they are kept.

Version v is the weights after Lightning has finished minibatch v. A *window* is the M minibatches of one optimizer step
(``accumulate_grad_batches``), counted from the epoch's beginning. Minibatch p uses, on every stage, forward and
backward:

============  ==========================================  =================================================
policy        version                                     source
============  ==========================================  =================================================
``stash``     p - Nm                                      HetPipe 2020, section 4; PipeDream 2019
``sync``      the one before p's window                   GPipe 2018
``2bw``       the one before the window before p's        PipeDream-2BW 2020
============  ==========================================  =================================================

No minibatch uses a version before v_e, at which the pipeline last started empty. With one in flight (Nm = 1), all use
the newest weights. ``spectrain``, ``xpipe`` and ``pipeoptim`` make a *prediction*: they move the version of ``stash``
on by as many optimizer steps as p misses. ``xpipe`` predicts once for each window, for all its minibatches.

``pipeline/weight_stash.py`` keeps the weights. ``tests/oracle_policies.py`` has the same formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lightning_hetpipe.errors import SettingError


class Reading(NamedTuple):
    """Weights that minibatches use: ``version``, moved on by ``steps`` optimizer steps."""

    version: int
    steps: int = 0


@dataclass(frozen=True)
class WeightPolicy:
    """A weight policy.

    Attributes:
        name: Value of the setting ``weights``.
        version: Returns the version that a minibatch uses, before v_e is considered.
        buffers: Returns the sufficient number of version buffers while only optimizer steps change weights.
        behind: Returns the largest number of minibatches by which weights are behind, without the own window's.
        staleness: Describes for people how stale gradients are at an Nm above 1.
        least_window: Returns the smallest number of minibatches in an optimizer step for a given Nm.
        predicts: Whether the version is moved on.
        keeps_change: Whether the change of the last step is also kept.
        by_window: Whether all minibatches of a window use one version, so that no wave may end within a window.
    """

    name: str
    version: Callable[[Versions, int], int]
    buffers: Callable[[Versions], int]
    behind: Callable[[Versions], int]
    staleness: Callable[[int], str]
    least_window: Callable[[int], int] = lambda in_flight: 1
    predicts: bool = False
    keeps_change: bool = False
    by_window: bool = False

    def told(self, in_flight: int) -> str:
        """Describe Nm and the staleness of gradients for people."""
        if in_flight == 1:
            return "1 minibatch in flight"
        return f"{in_flight} minibatches in flight, {self.staleness(in_flight)}"


@dataclass(frozen=True)
class Versions:
    """The versions of a sequence of minibatches that begins with an empty pipeline.

    Attributes:
        every: M, the minibatches of an optimizer step.
        empty_at: v_e.
        start: Version at which the epoch began. Windows are counted from it.
    """

    policy: WeightPolicy
    in_flight: int
    every: int = 1
    empty_at: int = 0
    start: int = 0

    def version(self, minibatch: int) -> int:
        """Return the version that ``minibatch``, counted from 1, uses."""
        return max(self.empty_at, self.policy.version(self, minibatch))

    def steps(self, minibatch: int) -> int:
        """Return s(p): the optimizer steps after the version that ``minibatch`` uses and before its own step."""
        return self.window(minibatch) - (self.version(minibatch) - self.start) // self.every

    @property
    def copies(self) -> int:
        """Copies of the weights that are held, including the change that predictions use if it is kept."""
        return self.policy.buffers(self) + int(self.policy.keeps_change)

    @property
    def period(self) -> int:
        """Minibatches after which everything repeats."""
        return self.every if self.policy.by_window else self.in_flight

    @property
    def most_steps(self) -> int:
        """The largest number of optimizer steps that a minibatch's weights lack."""
        return max(map(self.steps, self._next(self.empty_at)))

    def reading(self, minibatch: int) -> Reading:
        """Return the weights that ``minibatch`` uses, with the optimizer steps of a prediction."""
        return Reading(self.version(minibatch), self.steps(minibatch) if self.policy.predicts else 0)

    def window(self, minibatch: int) -> int:
        """Return the number of optimizer steps in the epoch before the step of ``minibatch``."""
        return (minibatch - self.start - 1) // self.every

    def before_window(self, minibatch: int) -> int:
        """Return the newest version before the window of ``minibatch``."""
        return self.start + self.window(minibatch) * self.every

    @property
    def most_in_flight(self) -> int:
        """The largest Nm, up to this one, for which windows are long enough."""
        return next(nm for nm in range(self.in_flight, 0, -1) if self.every >= self.policy.least_window(nm))

    @property
    def is_possible(self) -> bool:
        """True if windows are long enough for the policy."""
        return self.every >= self.policy.least_window(self.in_flight)

    @property
    def runs_ahead(self) -> bool:
        """True if several minibatches may be in flight. False if each uses the weights that the last one leaves."""
        return self.policy.behind(self) > 0 or (self.in_flight > 1 and self.every > 1)

    def check(self, wave: int | None = None) -> None:
        """Refuse windows that the policy cannot use. ``wave`` is W if there are several virtual workers.

        Raises:
            SettingError: which names the setting.
        """
        setting, policy = f"accumulate_grad_batches={self.every}", f"weights='{self.policy.name}'"
        if not self.is_possible:
            least = self.policy.least_window(self.in_flight)
            raise SettingError(
                f"{policy} needs {least} minibatches in one optimizer step where {self.in_flight} are in flight, and"
                f" {setting}; set accumulate_grad_batches={least} or more, or in_flight={self.most_in_flight}, or"
                " weights='stash'"
            )
        if self.policy.by_window and wave is not None and wave % self.every:
            raise SettingError(
                f"WSPCallback(wave={wave}) ends within an optimizer step, whose minibatches all use the same weights"
                f" with {policy}; set it, or shares, to multiples of {setting}, or leave it out"
            )

    def ahead(self, published: int) -> int:
        """Return how many minibatches after ``published``, the newest version, may be in flight."""
        numbers = range(published + 1, published + self.in_flight + 1)
        return sum(self.version(minibatch) <= published for minibatch in numbers)

    def needed(self, published: int) -> list[Reading]:
        """Return the available weights that minibatches after ``published``, the newest version, use."""
        there = (self.reading(each) for each in self._next(published) if self.version(each) <= published)
        return list(dict.fromkeys(there))

    def first_reader(self, version: int) -> int:
        """Return the first minibatch that uses ``version`` or a later version."""
        return next(each for each in self._next(version) if self.version(each) >= version)

    def _next(self, version: int) -> Iterator[int]:
        yield from range(version + 1, version + self.in_flight + 2 * self.every + 1)


def _stashed(versions: Versions, minibatch: int) -> int:
    return minibatch - versions.in_flight


def _stashed_by_window(versions: Versions, minibatch: int) -> int:
    return versions.before_window(minibatch) + 1 - versions.in_flight


def _of_steps(versions: Versions) -> int:
    return 1 - (1 - versions.in_flight) // versions.every


def _of_predictions(versions: Versions) -> int:
    """Return the number of different predictions: one comes with each window, and one Nm - 1 minibatches later."""
    windows, left = divmod(versions.in_flight - 1, versions.every)
    return 2 * (1 + windows) + (versions.every - left < left) if left else 1 + windows


def _behind_window(versions: Versions) -> int:
    return versions.every if versions.in_flight > 1 else 0


def _others(versions: Versions) -> int:
    return versions.in_flight - 1


def _many(in_flight: int) -> str:
    return f"{in_flight - 1} minibatch{'es' * (in_flight > 2)}"


STASH = WeightPolicy(
    "stash", _stashed, _of_steps, _others, lambda in_flight: f"so gradients up to {_many(in_flight)} stale"
)
SYNC = WeightPolicy(
    "sync",
    Versions.before_window,
    lambda versions: 1,
    lambda versions: 0,
    lambda in_flight: "and none across an optimizer step, so that no gradient is stale",
    by_window=True,
)
TWO_BUFFERS = WeightPolicy(
    "2bw",
    lambda versions, minibatch: versions.before_window(minibatch) - _behind_window(versions),
    lambda versions: 1 + (versions.in_flight > 1),
    _behind_window,
    lambda in_flight: "so gradients one optimizer step stale",
    least_window=lambda in_flight: in_flight,
    by_window=True,
)


def _predicting(
    name: str,
    version: Callable[[Versions, int], int] = _stashed,
    buffers: Callable[[Versions], int] = _of_predictions,
    keeps_change: bool = False,
) -> WeightPolicy:
    def staleness(in_flight: int) -> str:
        return f"weights predicted {_many(in_flight)} ahead"

    return WeightPolicy(name, version, buffers, _others, staleness, predicts=True, keeps_change=keeps_change)


PREDICTING = (
    _predicting("spectrain"),
    _predicting("xpipe", _stashed_by_window, _of_steps),
    _predicting("pipeoptim", keeps_change=True),
)
POLICIES = {policy.name: policy for policy in (STASH, SYNC, TWO_BUFFERS, *PREDICTING)}
