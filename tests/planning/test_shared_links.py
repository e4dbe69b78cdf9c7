"""Links give all transfers on them equal parts of their bandwidth."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.planning.model.cluster_simulation import SharedLink


def ends(*transfers: tuple[float, float], bandwidth: float = 1.0) -> dict[int, float]:
    """When each transfer is over that starts at a time and has so many bytes."""
    link: SharedLink[int] = SharedLink("link", bandwidth)
    found: dict[int, float] = {}
    coming = sorted(enumerate(transfers), key=lambda each: each[1][0])
    while coming or link.due() is not None:
        due = link.due()
        if coming and (due is None or coming[0][1][0] < due):
            index, (start, nbytes) = coming.pop(0)
            link.add(start, nbytes, index)
        else:
            assert due is not None
            found |= dict.fromkeys(link.take(due), due)
    assert link.carried == sum(nbytes for _, nbytes in transfers)
    return found


def test_a_transfer_alone_takes_its_bytes_over_the_bandwidth() -> None:
    assert ends((2.0, 6.0), bandwidth=3.0) == {0: 4.0}


def test_two_transfers_halve_the_bandwidth_while_both_go_on() -> None:
    assert ends((0.0, 4.0), (2.0, 4.0)) == {0: 6.0, 1: 8.0}


def test_equal_transfers_end_together() -> None:
    assert ends((0.0, 1.0), (0.0, 1.0), (0.0, 1.0)) == {0: 3.0, 1: 3.0, 2: 3.0}


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=6))
def test_a_link_is_busy_whenever_there_is_something_to_move(given: list[tuple[int, int]]) -> None:
    """However it is divided, all is moved as early as a link that takes one after the other would have moved it."""
    free = 0.0
    for start, nbytes in sorted(given):
        free = max(free, start) + nbytes
    found = ends(*given)
    assert len(found) == len(given)
    assert abs(max(found.values()) - free) < 1e-9
