"""Settings of the strategy, from its arguments and from environment variables: each refusal is one sentence."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

import torch

from lightning_hetpipe.errors import SettingError, nearest
from lightning_hetpipe.launch.ranks import Rank, WorkerRange
from lightning_hetpipe.pipeline.recorder import KEPT, Window
from lightning_hetpipe.rules.versions import POLICIES, WeightPolicy
from lightning_hetpipe.server.protocol.identifiers import MOST_VIRTUAL_WORKERS
from lightning_hetpipe.strategy.checks import whole
from lightning_hetpipe.strategy.wsp_callback import WSPCallback

MOST = 1000
"""The largest number of stages, and of minibatches in flight: each is a thread."""

LONGEST = 2000
"""Minibatches of a timeline: their trace has some 20 MB, the most that a viewer opens at ease."""

Stages = int | Literal["auto"]


def weight_policy(value: Any) -> WeightPolicy | None:
    """The policy of that name; None for "auto"."""
    names = ["auto", *POLICIES]
    if not isinstance(value, str) or value not in names:
        raise SettingError(
            f"weights={value!r} must be one of {', '.join(map(repr, names))}{nearest(str(value), names)}"
        )
    return POLICIES.get(value)


def updates(value: Any) -> int | Literal["auto"] | None:
    """The number of updates with lower learning rates."""
    return value if value in (None, "auto") else whole("lr_correction", value, other=", 'auto', or None")


def count(name: str, value: int | str) -> int | Literal["auto"]:
    """``value``, if it is "auto" or a whole number of at least 1."""
    if value == "auto":
        return "auto"
    found = whole(name, value, other=", or 'auto'")
    if found > MOST:
        raise SettingError(f"{name}={value!r} is more than {MOST}, each of which would take a thread; set fewer")
    return found


def virtual_workers(given: Any) -> int | WorkerRange:
    """The number of virtual workers on each node, or a range of numbers on all nodes."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        return whole("virtual_workers", given, most=MOST_VIRTUAL_WORKERS, other=", or two of them, as (1, 3)")
    pair = list(given)
    if len(pair) != 2 or any(isinstance(each, bool) or not isinstance(each, int) for each in pair):
        raise SettingError(
            f"virtual_workers={pair!r} must be a whole number, or the fewest and the most of them, as (1, 3)"
        )
    least, most = pair
    if not 1 <= least <= most <= MOST_VIRTUAL_WORKERS:
        raise SettingError(
            f"virtual_workers={pair!r} must be the fewest, at least 1, with which a run begins, and then the most, not"
            f" fewer and at most {MOST_VIRTUAL_WORKERS}"
        )
    return WorkerRange(least, most)


def most_workers(virtual_workers: int | WorkerRange) -> int:
    """The largest number that the setting allows."""
    return virtual_workers.most if isinstance(virtual_workers, WorkerRange) else virtual_workers


def check_cluster(virtual_workers: int) -> None:
    """Refuses a cluster without a plan where there are several virtual workers."""
    if virtual_workers > 1:
        raise SettingError(
            f"cluster is planned at the start of a fit for one virtual worker, and there are {virtual_workers}; give a"
            f" plan of {virtual_workers}, too (docs/planning.md), leave cluster out, or train with one virtual worker"
        )


def timeline(value: Any) -> Window | None:
    """Minibatches of which a timeline is to be kept; None for no timeline."""
    if value is False:
        return None
    if value is True:
        return Window()
    pair = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if len(pair) != 2 or not all(type(number) is int for number in pair) or not 1 <= pair[0] <= pair[1]:
        raise SettingError(
            f"timeline={value!r} must be True, for the last {KEPT} minibatches, False, or the first and the last"
            " minibatch to keep, such as (100, 120); they are counted from 1"
        )
    first, last = pair
    if last - first >= LONGEST:
        raise SettingError(
            f"timeline={value!r} is {last - first + 1} minibatches, of which at most {LONGEST} are kept in memory;"
            " ask for fewer"
        )
    return Window(first, last, LONGEST)


def check_platform(virtual_workers: int, platform: str) -> None:
    """Refuse several processes where they cannot be started; ``platform`` is ``sys.platform``."""
    if virtual_workers > 1 and platform == "win32":
        raise SettingError(
            f"virtual_workers={virtual_workers} needs processes that inherit sockets, which Windows does not have;"
            " train in WSL 2, or leave virtual_workers out"
        )


def only_wsp(given: Sequence[WSPCallback]) -> WSPCallback:
    """The one that holds, of those that the Trainer and the strategy were given."""
    if len(given) > 1:
        raise SettingError(
            f"this run has {len(given)} WSPCallbacks; give one, to HetPipeStrategy(wsp=...) or among the Trainer's"
            " callbacks (on the command line: strategy.wsp, or strategy.wsp=null and one of callbacks)"
        )
    return given[0] if given else WSPCallback()


def stage_counts(stages: Any, virtual_workers: int) -> Stages | list[Stages]:
    """``stages``, checked as far as it can be before it is known who starts how many virtual workers."""
    if not isinstance(stages, Sequence) or isinstance(stages, str):
        return count("stages", stages)
    if not stages or len(stages) % virtual_workers:
        raise _other_stages(stages, virtual_workers)
    return [count("stages", each) for each in stages]


def stages_of(stages: Stages | list[Stages], rank: Rank) -> Stages:
    """k of one virtual worker; a list has one for each of a node's, or for each of all.

    Raises:
        SettingError: if it has another number of them.
    """
    if not isinstance(stages, list):
        return stages
    if len(stages) == rank.size:
        return stages[rank.index]
    if len(stages) != rank.per_node:
        raise _other_stages(stages, rank.per_node, rank.size)
    return stages[rank.local]


def _other_stages(stages: Sequence[Any], virtual_workers: int, of: int | None = None) -> SettingError:
    among = f" on this node, of {of} in all" if of not in (None, virtual_workers) else ""
    return SettingError(
        f"stages={list(stages)!r} has {len(stages)} entries, but there are virtual_workers={virtual_workers}{among};"
        " give one for each, or one number for all"
    )


def module_names(module: str | Sequence[str] | None) -> list[str] | None:
    """The ``module`` setting as a list of names."""
    if module is None or isinstance(module, str):
        return None if module is None else [module]
    names = list(module) if isinstance(module, Sequence) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise SettingError(f"module={module!r} must be the name of a module, or a list of names")
    return names


def run_seed() -> int:
    """Seed of the run's random numbers: PL_GLOBAL_SEED, else torch's own."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    return int(seed) if seed else torch.initial_seed()


def torch_threads() -> int:
    """Threads of each torch operation in training: OMP_NUM_THREADS, else 1; never derived from k, for exactness."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, int(threads)) if threads.isdigit() else 1
