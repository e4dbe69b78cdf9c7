"""Runs that many faults befall, drawn at random by a seed, end exact: as the oracle with the recorded membership.

``pytest -n 4 tests/wsp/test_soak.py`` runs all seeds, four at a time: each has a folder and ports of its own. A seed
has up to three virtual workers and their server; it takes two or three minutes on two cores, which are idle for most
of that.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.wsp.launch import Job, free_port, left_behind, start
from tests.wsp.lost_time import decisions_of, lost_time, strikes_of, summary
from tests.wsp.membership import check_recorded, epochs_of

FAULTS = 10
WORKERS = 3
EPOCHS = 10
SECONDS = 1200.0
"""After which a run hangs: several times what it takes on two busy cores."""
SEEDS = range(50)
IN_CI = (0, 3)
"""Seed and number of faults of the run that is made each time."""

BEFALL = ("Pushed", "StageUpdate", "Read", "Pull", "Pulled", "Arrive", "Gather")
WITH_BODY = ("StageUpdate", "Read")


def drawn(seed: int, number: int, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Faults by address, each of which befalls the first process that comes there; and joins of virtual workers.

    Those of one virtual worker come one after the other. Those that join are the last ones: the others are enough for
    the run to begin.
    """
    draw = random.Random(seed)
    last: dict[int, str] = {}

    def fault(name: str, what: str, vws: Sequence[int]) -> dict[str, Any]:
        vw, message = draw.choice(vws), draw.choice(BEFALL)
        when = draw.choice(["before", "after", "middle"] if message in WITH_BODY else ["before", "after"])
        told: dict[str, Any] = {
            "vw": vw,
            "room": "fit-1",
            "message": message,
            "nth": draw.randrange(1, 5),
            "when": when,
            "what": what,
        }
        told |= {"mark": str(folder / name), **({"follows": last[vw]} if vw in last else {})}
        last[vw] = told["mark"]
        return told

    joining = range(draw.randint(1, WORKERS), WORKERS)
    joins = [{**fault(f"join {vw}", f"join {vw}", [0]), "when": "before"} for vw in joining]
    faults = []
    for index in range(number):
        what = draw.choice(["kill", "kill", "kill", "server", "server", "garbage", "stop"])
        faults.append(fault(f"fault {index}", what, range(what != "server", WORKERS)))
    return faults, joins


def soak(folder: Path, seed: int, number: int) -> tuple[Job, str]:
    faults, joins = drawn(seed, number, folder)
    told = {
        "faults": [*faults, *joins],
        "wsp": {"lease": 6.0, "restarts": number},
        "awaits": "all",
        "log": str(folder / "decisions"),
        "trainer": {"max_epochs": EPOCHS},
        "timeout": 120,
    }
    if joins:
        told["virtual_workers"] = [WORKERS - len(joins), WORKERS]
    job = Job(folder, "by epoch", lengths=(5,) * WORKERS, in_flight=2, more=told, seconds=SECONDS)
    done = start(job, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    (folder / "said").write_text(done.stderr)
    assert done.returncode in (0, 1), (done.returncode, done.stderr)  # 1 where one had not come back in the end
    assert " failed.\n" not in done.stderr, done.stderr  # each is lost, or comes back, and none has an error
    assert left_behind(job) == [], done.stderr
    assert (folder / "0.pt").exists(), done.stderr
    return job, done.stderr


@pytest.mark.parametrize(
    ("seed", "number"),
    [
        pytest.param(*IN_CI, id="few"),
        *(pytest.param(seed, FAULTS, id=str(seed), marks=pytest.mark.slow) for seed in SEEDS),
    ],
)
def test_a_run_with_faults_ends_exact(
    seed: int, number: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Also says what each fault cost, and pytest at its end what those of all seeds did."""
    job, said = soak(tmp_path, seed, number)
    parts = epochs_of(tmp_path / "decisions")
    assert len(parts) == EPOCHS, said
    check_recorded(job, job.written_so_far(), parts, 2)
    waits = tmp_path / "waits"
    held = [(begin, end) for begin, end in map(json.loads, waits.read_text().splitlines())] if waits.exists() else []
    strikes = strikes_of(drawn(seed, number, tmp_path)[0])
    lost = lost_time(decisions_of(tmp_path / "decisions"), strikes, WORKERS, held=held)
    told = [(each.what, each.seconds) for each in lost]
    print(f"seed {seed}:", summary(told))
    record_property("time lost", told)
