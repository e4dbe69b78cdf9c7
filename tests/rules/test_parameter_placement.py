"""Parameters lie on servers by size, in turn, or beside the stages that hold them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.rules.waves import PLACEMENTS, place_parameters


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 4), st.sampled_from(PLACEMENTS))
def test_each_parameter_lies_on_one_server(sizes: list[int], servers: int, how: str) -> None:
    found = place_parameters(sizes, servers, how, [index % servers for index in range(len(sizes))])
    assert sorted(index for indices in found for index in indices) == [*range(len(sizes))]
    assert found == [sorted(indices) for indices in found]


def test_sizes_are_balanced() -> None:
    assert place_parameters([5, 1, 4, 3], 2, "size") == [[0, 1], [2, 3]]


def test_local_parameters_lie_beside_the_stage_of_virtual_worker_0_that_holds_them() -> None:
    assert place_parameters([1] * 5, 3, "local", [0, 1, 1, 0, 1]) == [[0, 3], [1, 2, 4], []]


def test_virtual_workers_within_nodes_leave_all_with_the_coordinator() -> None:
    assert place_parameters([1, 2], 2, "local") == [[0, 1], []]
