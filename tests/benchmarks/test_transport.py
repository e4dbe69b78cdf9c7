"""The transport benchmark: every carrier moves what it says, and ratios are formed within rounds."""

import pytest

from benchmarks.transport import CLIENTS, TITLES, Carried, measure, ratio, report

MACHINE = {"cpu": "a cpu", "cpus": 2, "load_average": 0.0, "torch": "2"}


@pytest.mark.slow
@pytest.mark.parametrize("clients", CLIENTS)
@pytest.mark.parametrize("carrier", ["block", "memory", "grpc", "socket"])
def test_carriers_are_measured_in_processes_of_their_own(carrier: str, clients: int) -> None:
    assert measure(carrier, clients, size=1 << 20, rounds=1).rate > 0


def test_the_report_says_what_was_met_missed_and_failed() -> None:
    rounds = [
        {
            "block 1": Carried(4.0, 7.0),
            "memory 1": Carried(5.0, 0.0),
            "grpc 1": Carried(1.0, 9.0),
            "bare 1": Carried(2, 0),
        },
        {"block 1": Carried(9.0, 8.0), "memory 1": Carried(10.0, 0.0)},
    ]
    spread = ratio(rounds, "block 1", "memory 1")
    assert spread is not None
    assert (spread.low, spread.median, spread.high) == pytest.approx((0.8, 0.85, 0.9))
    assert ratio(rounds, "tls 1", "socket 1") is None
    outcome = report(MACHINE, 1 << 29, rounds, {"tls 1": "no openssl"})
    assert not outcome.complete
    lines = outcome.text.splitlines()
    assert next(line for line in lines if line.startswith(TITLES["block"])).split()[-1] == "8"
    assert next(line for line in lines if line.startswith("a/b")).split()[-1] == "met"
    assert next(line for line in lines if line.startswith("d/e")).split()[-1] == "missed"
    assert "no openssl" in outcome.text
