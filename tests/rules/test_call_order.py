"""Minibatches at a segment that each of them visits several times go one by one, in order."""

from __future__ import annotations

from lightning_hetpipe.rules.schedule import CallOrder


def test_minibatches_are_admitted_one_by_one() -> None:
    order = CallOrder[str]()
    assert order.admits(1, "one")
    assert order.admits(1, "one again")
    assert not order.admits(2, "two")
    assert not order.admits(3, "three")
    assert order.close(1) == "two"
    assert order.admits(2, "two")
    assert not order.admits(4, "four"), "three comes before it"
    assert order.close(2) == "three"
    assert order.close(3) == "four"


def test_only_the_open_minibatch_closes() -> None:
    order = CallOrder[str]()
    order.admits(1, "one")
    order.admits(2, "two")
    assert order.close(2) is None
    assert order.close(1) == "two"
    assert order.close(2) is None
    assert order.admits(7, "seven"), "nothing is open"


def test_what_was_cancelled_does_not_hold_up_others() -> None:
    order = CallOrder[str]()
    for number in (1, 2, 3):
        order.admits(number, str(number))
    assert order.withdraw(2)
    assert not order.withdraw(2)
    assert order.close(1) == "3"
    assert order.admits(2, "two"), "it comes too late to wait for three"
