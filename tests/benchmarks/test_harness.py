"""Rounds, processes and tables."""

from collections.abc import Callable

import pytest

from benchmarks.harness import Process, ProcessFailed, Spread, in_rounds, run_together, table


def test_a_failed_process_ends_those_that_wait_for_it() -> None:
    processes = [Process("tests.benchmarks.waiting_process", (does,)) for does in ("wait", "fail")]
    with pytest.raises(ProcessFailed, match="KeyError"):
        run_together(processes, timeout=120)


def test_a_process_that_never_ends_is_given_up() -> None:
    with pytest.raises(ProcessFailed, match="not done after 1 s"):
        run_together([Process("http.server", ("0", "--bind", "127.0.0.1"))], timeout=1)


def test_rounds_interleave_and_leave_out_what_failed() -> None:
    order: list[str] = []

    def job(name: str, fails: bool = False) -> Callable[[], int]:
        def work() -> int:
            order.append(name)
            if fails:
                raise ProcessFailed(f"{name} broke")
            return len(order)

        return work

    results, failures = in_rounds({"a": job("a"), "b": job("b", fails=True), "c": job("c")}, rounds=2)
    assert order == ["a", "b", "c", "a", "c"]
    assert results == [{"a": 1, "c": 3}, {"a": 4, "c": 5}]
    assert failures == {"b": "b broke"}


def test_spread_is_median_and_range() -> None:
    assert Spread.of([3.0, 1.0, 10.0]) == Spread(3.0, 1.0, 10.0)


def test_table_aligns_names_left_and_figures_right() -> None:
    assert table([("name", "x"), ("a", "10")]) == "name   x\na     10"
