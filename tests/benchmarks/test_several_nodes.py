"""The benchmark over several machines: both sides train over the network, and ratios are formed within rounds."""

import pytest

from benchmarks.harness import ProcessFailed
from benchmarks.several_nodes import DDP, RATES, VARIANTS, Found, measure, report
from benchmarks.several_nodes_worker import Task
from tests.support.namespaces import Unavailable, network

MACHINE = {"cpu": "a cpu", "cores_used": "CPUs 0 and 1", "load_average": 0.0, "torch": "2", "lightning": "2"}
OURS = list(VARIANTS)[1]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["ddp", "hetpipe"])
def test_bytes_are_counted_on_the_wire(variant: str) -> None:
    """DDP sends and receives all gradients in each minibatch; a wave of four moves as much once: half of it to a server
    on the other machine, half of it from there, and the same for the other machine's virtual worker.

    Waves travel while minibatches are computed, so the count's first and last one may be cut: one of eight."""
    try:
        with network(1):
            pass
    except Unavailable as why:
        pytest.skip(str(why))
    task = Task("ddp" if variant == "ddp" else "hetpipe", width=512, warmup=4, steps=32)
    found = measure(task, None)
    weights = task.layers * task.width * (task.width + 1) * 4
    expected = 2 * weights / (1 if variant == "ddp" else task.in_flight)
    assert found.images > 0
    assert 7 / 8 * expected < found.bytes < 1.5 * expected


def test_the_report_says_what_was_found_and_what_failed() -> None:
    link = next(iter(RATES))
    rounds = [
        {f"{DDP}, {link}": Found(10.0, 3e6, 0.5), f"{OURS}, {link}": Found(40.0, 1e6, 0.25)},
        {f"{DDP}, {link}": Found(20.0, 3e6, 0.5), f"{OURS}, {link}": Found(40.0, 1e6, 0.25)},
    ]
    outcome = report(MACHINE, rounds, {f"{DDP}, unlimited": str(ProcessFailed("no namespaces"))})
    assert not outcome.complete
    ours = next(line for line in outcome.text.splitlines() if line.strip().startswith(OURS))
    assert ours.split()[-7:] == ["40", "40", "..", "40", "3.00", "1.0", "0.2500"]
    assert "no namespaces" in outcome.text
    assert any(line.strip().startswith(DDP) and "failed" in line for line in outcome.text.splitlines())
