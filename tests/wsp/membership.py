"""Membership of a run as its coordinator has recorded it, and the run that the oracle makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_hetpipe.run.extensions.waves_and_cuts import END, EPOCH
from tests.oracle import Run, State
from tests.support.equality import assert_same
from tests.wsp.launch import Job
from tests.wsp.lost_time import decisions_of
from tests.wsp.test_exact import all_batches, together


@dataclass
class Part:
    """An epoch, as the servers saw it: by virtual worker, its incarnation and how many waves of it were committed."""

    waves: dict[int, int] = field(default_factory=dict)
    incarnations: dict[int, int] = field(default_factory=dict)


def epochs_of(log: Path, session: str = "fit-1") -> list[Part]:
    """The epochs of a fit with D = 0, of the decisions in ``log``.

    Commits that a generation's weights do not include were lost with servers; what was pushed again is committed again.

    Raises:
        AssertionError: if an update was committed twice.
    """
    committed: list[dict[str, Any]] = []
    places: list[tuple[int, int]] = []  # of the ends of epochs: the cut, and how many updates came before
    for each in decisions_of(log, session):
        match each["decision"]:
            case "GenerationBegan":
                committed = [one for one in committed if one["count"] <= each["count"]]
            case "UpdateCommitted":
                committed.append(each)
            case "CutClosed" if each["cut"] % EPOCH == END:
                places = [place for place in places if place[0] < each["cut"]]
                places.append((each["cut"], len(committed)))
    names = [(one["vw"], one["incarnation"], one["clock"]) for one in committed]
    assert len(names) == len(set(names)), "an update was committed twice"
    found, start = [], 0
    for _, end in places:
        part = Part()
        for one in committed[start:end]:
            part.waves[one["vw"]] = part.waves.get(one["vw"], 0) + 1
            assert part.incarnations.setdefault(one["vw"], one["incarnation"]) == one["incarnation"]
        found.append(part)
        start = end
    return found


def expected(job: Job, parts: Sequence[Part], wave: int, **options: Any) -> list[Run]:
    """The oracle's run of ``job`` with the membership of ``parts``; a virtual worker's is that of all its processes.

    One that comes back goes on from virtual worker 0's state at the end of the epoch before.
    """
    whole = all_batches(job)
    runs = [Run() for _ in whole]
    at: list[tuple[int, State] | None] = [None] * len(whole)
    there: dict[int, int] = {}
    for part in parts:
        assert part.waves[0] == -(-len(whole[0]) // wave), "virtual worker 0 is always there"
        for vw, incarnation in part.incarnations.items():
            if there.setdefault(vw, incarnation) != incarnation:
                at[vw], there[vw] = at[0], incarnation
        data = [[batches[: wave * part.waves.get(vw, 0)]] for vw, batches in enumerate(whole)]
        resumed = None if at[0] is None else [state or at[0] for state in at]
        for vw, run in enumerate(together(job, wave, data, resumed=resumed, **options)):
            if vw in part.waves:
                before = 0 if (state := at[vw]) is None else state[0]
                at[vw] = before + len(run.outputs), run.states[-1]
                runs[vw].outputs += run.outputs
                runs[vw].states += run.states[1:]
    return runs


def check_recorded(
    job: Job, written: Sequence[dict[str, Any] | None], parts: Sequence[Part], wave: int, **options: Any
) -> None:
    """Check what the last process of each virtual worker has written, None for nothing, against :func:`expected`."""
    for vw, (found, wanted) in enumerate(zip(written, expected(job, parts, wave, **options), strict=True)):
        if found is None:
            continue
        outputs = wanted.outputs[len(wanted.outputs) - len(found["outputs"]) :]
        for p, (mine, output) in enumerate(zip(found["outputs"], outputs, strict=True), start=1):
            assert_same(output, mine, f"VW {vw}, minibatch {p} of its last process")
        assert_same(wanted.states[-1].weights, found["end"].weights, f"VW {vw}")
        assert_same(wanted.states[-1].buffers, found["end"].buffers, f"VW {vw}")
        assert_same(wanted.states[-1].optimizer, found["end"].optimizer, f"VW {vw}")
