"""A shard: what it takes, adds, gives and refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_hetpipe.server.protocol.identifiers import Commit, Refusal, RemoteFault, UpdateId
from lightning_hetpipe.server.protocol.messages import (
    Hello,
    Holding,
    Load,
    Parameter,
    Read,
    ShardRequest,
    StageUpdate,
)
from lightning_hetpipe.server.protocol.shard import (
    CHUNK,
    Shard,
    ShardLayout,
    add,
    block_of,
    copy_finite,
    memory_of,
    place,
)
from tests.server.world import commits, parameter

PARAMETERS = (parameter("a", [3], "bfloat16"), parameter("b", [2, 2]), parameter("c", [], "float64"))


def block(layout: ShardLayout, values: list[Tensor]) -> bytes:
    found = block_of(layout.size)
    for view, value in zip(layout.views(found), values, strict=True):
        view.copy_(value)
    return bytes(memory_of(found))


def send(shard: Shard, message: ShardRequest, body: bytes = b"") -> tuple[Holding | RemoteFault, bytes]:
    memory = shard.open(message, len(body))
    memory[:] = body
    if isinstance(message, StageUpdate):
        shard.examine(message, memory)
    answer, views = shard.run(message, memory)
    return answer, b"".join(bytes(view) for view in views)


def loaded(parameters: tuple[Parameter, ...] = PARAMETERS, value: float = 0.0) -> Shard:
    shard = Shard("epoch")
    layout = ShardLayout(parameters, update=False)
    weights = [torch.full(each.shape, value, dtype=torch.float64) for each in parameters]
    answer, _ = send(shard, Load(0, 0, "g", "epoch", (), parameters), block(layout, weights))
    assert answer == Holding("g")
    return shard


def update_of(value: float, parameters: tuple[Parameter, ...] = PARAMETERS) -> bytes:
    layout = ShardLayout(parameters, update=True)
    return block(layout, [torch.full(each.shape, value, dtype=torch.float64) for each in parameters])


def read(shard: Shard, start: int, tail: tuple[Commit, ...]) -> list[Tensor]:
    answer, body = send(shard, Read(0, 0, "g", start, tail))
    assert isinstance(answer, Holding), answer
    layout = ShardLayout(PARAMETERS, update=False)
    return layout.views(torch.frombuffer(bytearray(body), dtype=torch.uint8))


def refused(shard: Shard, message: ShardRequest, body: bytes = b"") -> Refusal:
    try:
        answer, _ = send(shard, message, body)
    except RemoteFault as fault:
        return fault.refusal
    assert isinstance(answer, RemoteFault)
    return answer.refusal


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), max_size=3),
            st.sampled_from(["bfloat16", "float16", "float32", "float64", "complex64", "int8"]),
        ),
        max_size=6,
    )
)
def test_parameters_of_any_kind_lie_side_by_side(kinds: list[tuple[list[int], str]]) -> None:
    layout = ShardLayout(tuple(parameter(f"p{i}", *kind) for i, kind in enumerate(kinds)), update=False)
    values = [torch.randint(0, 99, shape).to(getattr(torch, dtype)) for shape, dtype in kinds]
    views = layout.views(torch.frombuffer(bytearray(block(layout, values)) or bytearray(1), dtype=torch.uint8))
    for value, view in zip(values, views, strict=True):
        assert view.dtype is value.dtype
        assert torch.equal(view, value)


def test_updates_are_added_once_and_in_the_order_that_the_pull_names() -> None:
    shard = loaded()
    for vw, value in enumerate([1e16, 1.0, -1e16]):
        send(shard, StageUpdate(vw, 0, "g", 0), update_of(value))
    # In float64: (0 + 1e16) - 1e16 + 1 is 1, and (0 + 1e16) + 1 - 1e16 is 0.
    tail = commits((0, 0), (2, 0), (1, 0))
    assert read(shard, 0, tail)[2].item() == 1.0
    assert read(shard, 0, tail)[2].item() == 1.0
    assert read(shard, 3, ())[2].item() == 1.0
    assert shard.staged == {}


def test_an_update_of_another_dtype_is_converted_then_added() -> None:
    parameters = (parameter("a", [2], "float32", "bfloat16"),)
    shard = loaded(parameters, 1.0)
    send(shard, StageUpdate(0, 0, "g", 0), update_of(2**-12, parameters))
    _, body = send(shard, Read(0, 0, "g", 0, commits((0, 0))))
    assert torch.frombuffer(bytearray(body), dtype=torch.float32).tolist() == [1 + 2**-12] * 2


def test_a_mean_is_divided_in_the_weights_dtype() -> None:
    shard = loaded()
    send(shard, StageUpdate(0, 0, "g", 0), update_of(1.0))
    weights = read(shard, 0, (Commit(UpdateId(0, 0, 0), 3),))
    assert torch.equal(weights[1], torch.full([2, 2], 1.0) / 3)
    assert weights[2].item() == 1 / 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_an_update_that_is_not_finite_is_named_and_leaves_nothing(value: float) -> None:
    shard = loaded()
    layout = ShardLayout(PARAMETERS, update=True)
    body = block(layout, [torch.zeros(3), torch.tensor([[0.0, 0.0], [value, 0.0]]), torch.zeros([])])
    with pytest.raises(RemoteFault, match="VW 1 of wave 4 has a NaN or infinity in 'b'") as caught:
        send(shard, StageUpdate(1, 0, "g", 4), body)
    assert caught.value.refusal is Refusal.NOT_FINITE
    assert shard.staged == {}


def test_what_is_refused() -> None:
    shard, update = loaded(), update_of(1.0)
    send(shard, StageUpdate(1, 5, "g", 7), update)
    cases: list[tuple[ShardRequest, bytes, Refusal]] = [
        (StageUpdate(1, 5, "g", 7), update, Refusal.STALE),  # staged
        (StageUpdate(1, 5, "g", 6), update, Refusal.STALE),
        (StageUpdate(1, 4, "g", 9), update, Refusal.STALE),  # of an older incarnation
        (StageUpdate(2, 0, "older", 0), update, Refusal.GENERATION),
        (StageUpdate(2, 0, "g", 0), update[:-1], Refusal.MALFORMED),
        (Hello(0, 0), b"x", Refusal.MALFORMED),
        (Load(0, 0, "late", "epoch", (), PARAMETERS), update, Refusal.GENERATION),  # over what is there no more
        (Load(0, 0, "g", "epoch", (), PARAMETERS), update, Refusal.STALE),  # there already
        (Load(0, 0, "next", "g", (), PARAMETERS), update[:-1], Refusal.MALFORMED),
        (Load(0, 0, "next", "g", (), (parameter("a", [1], "Tensor"),)), b"", Refusal.MALFORMED),
        (Load(0, 0, "next", "g", (), (parameter("a", [-1]),)), b"", Refusal.MALFORMED),
        (Read(0, 0, "older", 0, ()), b"", Refusal.GENERATION),
        (Read(0, 0, "g", 1, ()), b"", Refusal.MALFORMED),  # a commit is missing
        (Read(0, 0, "g", 0, commits((2, 0))), b"", Refusal.MALFORMED),  # never staged
        (Read(0, 0, "g", 0, (Commit(UpdateId(1, 5, 7), 0),)), b"", Refusal.MALFORMED),
    ]
    for message, body, refusal in cases:
        assert refused(shard, message, body) is refusal, message
    assert shard.content == "g"
    assert shard.loaded
    assert shard.applied == 0
    assert list(shard.staged) == [1]
    _, body = send(shard, Read(1, 5, "g", 0, (Commit(UpdateId(1, 5, 7), 1),)))
    assert body == update
    assert refused(shard, StageUpdate(1, 5, "g", 7), update) is Refusal.STALE  # added
    assert refused(shard, Read(0, 0, "g", 0, ()), b"") is Refusal.STALE  # the order has gone on


def test_one_body_at_a_time_of_each_vw() -> None:
    shard, update = loaded(), update_of(1.0)
    memory = shard.open(StageUpdate(1, 0, "g", 0), len(update))
    with pytest.raises(RemoteFault) as caught:
        shard.open(StageUpdate(1, 0, "g", 0), len(update))
    assert caught.value.refusal is Refusal.BUSY
    assert shard.open(StageUpdate(2, 0, "g", 0), len(update))  # another VW's does not wait for it
    shard.abandoned(StageUpdate(1, 0, "g", 0))
    del memory
    send(shard, StageUpdate(1, 0, "g", 0), update)
    assert shard.bytes_held == 3 * len(update)  # the weights, VW 1's, and what is still to come of VW 2's


def test_an_update_that_the_server_sees_stays_where_it_is_and_as_it_is() -> None:
    shard, update = loaded(), memoryview(bytearray(update_of(1.0)))
    stage = StageUpdate(1, 0, "g", 0)
    assert shard.open(stage, len(update), update) is update
    shard.run(stage, update)
    before = bytes(update)
    weights = read(shard, 0, (Commit(UpdateId(1, 0, 0), 3),))
    assert weights[2].item() == 1 / 3
    assert bytes(update) == before  # the VW needs it if the server dies
    assert shard.staged == {}
    assert shard.bytes_held == len(update)  # the weights


def test_weights_come_into_memory_of_the_shards_own() -> None:
    shard = Shard("epoch")
    theirs = memoryview(bytearray(update_of(1.0)))
    load = Load(0, 0, "g", "epoch", (), PARAMETERS)
    assert shard.open(load, len(theirs), theirs) is not theirs


def test_updates_that_are_sent_come_into_the_same_memory_wave_after_wave() -> None:
    shard, update = loaded(), update_of(1.0)
    places = set()
    for clock in range(3):
        memory = shard.open(StageUpdate(1, 0, "g", clock), len(update))
        places.add(np.asarray(memory).ctypes.data)
        memory[:] = update
        shard.run(StageUpdate(1, 0, "g", clock), memory)
        read(shard, clock, (Commit(UpdateId(1, 0, clock), 1),))
    assert len(places) == 1
    assert shard.bytes_held == 2 * len(update)


def test_a_commit_that_is_named_twice_is_refused_and_nothing_is_added() -> None:
    shard, update = loaded(), update_of(1.0)
    send(shard, StageUpdate(1, 0, "g", 0), update)
    assert refused(shard, Read(0, 0, "g", 0, commits((1, 0), (1, 0)))) is Refusal.MALFORMED
    assert read(shard, 0, ())[2].item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int8])
def test_what_is_larger_than_a_chunk_is_worked_on_to_its_end(dtype: torch.dtype) -> None:
    source = torch.randint(0, 9, (CHUNK + 2, 2)).to(dtype)
    target = torch.zeros_like(source)
    assert copy_finite(target, source.t().contiguous().t())
    assert torch.equal(target, source)
    target.zero_()
    assert copy_finite(target, source)
    assert torch.equal(target, source)
    add(target, [(source, 1), (source, 1)])
    assert torch.equal(target, source + source + source)
    assert copy_finite(target, target)
    if dtype.is_floating_point:
        source[-1, -1] = float("nan")
        assert not copy_finite(target, source)
        assert not copy_finite(source, source)


def test_weights_whose_sender_dies_can_be_loaded_again() -> None:
    shard = loaded(value=1.0)
    load = Load(0, 0, "next", "g", (), PARAMETERS)
    shard.open(load, len(update_of(2.0)))
    shard.abandoned(load)
    answer, _ = send(shard, Hello(0, 0))
    assert answer == Holding("next")
    assert not shard.loaded
    assert refused(shard, Read(0, 0, "next", 0, ())) is Refusal.GENERATION
    send(shard, load, update_of(2.0))
    _, body = send(shard, Read(0, 0, "next", 0, ()))
    assert body == update_of(2.0)


SIZES = [10, 1, 7, 3, 3, 2]


@pytest.mark.parametrize(
    ("how", "placed"),
    [("size", [[0, 4], [1, 2, 3, 5]]), ("round_robin", [[0, 2, 4], [1, 3, 5]]), ("local", [[0, 1, 2, 3, 4, 5], []])],
)
def test_placement(how: str, placed: list[list[int]]) -> None:
    assert place([parameter(f"p{i}", [size]) for i, size in enumerate(SIZES)], 2, how) == placed


PART = st.lists(st.booleans(), min_size=7, max_size=7).map(
    lambda own: tuple(i for i, is_own in enumerate(own) if is_own)
)
KINDS = st.sampled_from(["bfloat16", "float32", "float64", "int8"])


@settings(deadline=None)
@given(PART, st.lists(st.tuples(st.integers(0, 3), KINDS), min_size=7, max_size=7), st.booleans())
def test_an_update_in_parts_is_the_same_update(part: tuple[int, ...], kinds: list[tuple[int, str]], swap: bool) -> None:
    parameters = tuple(parameter(f"p{i}", [size], dtype) for i, (size, dtype) in enumerate(kinds))
    rest = tuple(i for i in range(7) if i not in part)
    layout = ShardLayout(parameters, update=True)
    values = [torch.arange(size) + i for i, (size, _) in enumerate(kinds)]
    whole, split = loaded(parameters, 1.0), loaded(parameters, 1.0)
    send(whole, StageUpdate(0, 0, "g", 0), block(layout, values))
    for own in filter(None, (rest, part) if swap else (part, rest)):
        send(split, StageUpdate(0, 0, "g", 0, own), block(layout.only(own), [values[i] for i in own]))
    _, expected = send(whole, Read(0, 0, "g", 0, commits((0, 0))))
    _, found = send(split, Read(0, 0, "g", 0, commits((0, 0))))
    assert found == expected
    weights = ShardLayout(parameters, update=False)
    views = weights.views(torch.frombuffer(bytearray(expected) or bytearray(1), dtype=torch.uint8))
    for own in filter(None, (part, rest)):
        _, some_bytes = send(split, Read(0, 0, "g", 1, (), own))
        own_views = weights.only(own).views(torch.frombuffer(bytearray(some_bytes) or bytearray(1), dtype=torch.uint8))
        assert all(torch.equal(view, views[i]) for view, i in zip(own_views, own, strict=True))


def some_of(*numbers: int) -> bytes:
    layout = ShardLayout(PARAMETERS, update=True).only(numbers)
    return block(layout, [torch.ones(PARAMETERS[number].shape) for number in numbers])


def test_an_update_is_added_once_all_parts_are_there() -> None:
    shard = loaded()
    send(shard, StageUpdate(0, 0, "g", 0, (0, 2)), some_of(0, 2))
    assert refused(shard, Read(0, 0, "g", 0, commits((0, 0)))) is Refusal.MALFORMED
    assert refused(shard, StageUpdate(0, 0, "g", 0, (0, 2)), some_of(0, 2)) is Refusal.STALE  # it is there
    assert refused(shard, StageUpdate(0, 0, "g", 0, (0, 1)), some_of(0, 1)) is Refusal.MALFORMED
    send(shard, StageUpdate(0, 0, "g", 0, (1,)), some_of(1))
    assert [weight.sum().item() for weight in read(shard, 0, commits((0, 0)))] == [3, 4, 1]
    assert refused(shard, StageUpdate(0, 0, "g", 0, (1,)), some_of(1)) is Refusal.STALE  # it was added


def test_parts_of_a_former_update_are_dropped() -> None:
    """It was never pushed, as its virtual worker was lost."""
    shard = loaded()
    send(shard, StageUpdate(0, 0, "g", 0, (0, 2)), some_of(0, 2))
    send(shard, StageUpdate(0, 1, "g", 0, (0,)), some_of(0))
    send(shard, StageUpdate(0, 1, "g", 0, (1, 2)), some_of(1, 2))
    layout = ShardLayout(PARAMETERS, update=True)
    assert shard.bytes_held == ShardLayout(PARAMETERS, update=False).size + sum(
        layout.only(part).size for part in ((0,), (1, 2))
    )
    assert [weight.sum().item() for weight in read(shard, 0, (Commit(UpdateId(0, 1, 0), 1),))] == [3, 4, 1]


@pytest.mark.parametrize("part", [(3,), (-1,), (1, 0), (0, 0)])
def test_numbers_of_no_parameters(part: tuple[int, ...]) -> None:
    shard = loaded()
    assert refused(shard, StageUpdate(0, 0, "g", 0, part), b"") is Refusal.MALFORMED
    assert refused(shard, Read(0, 0, "g", 0, (), part)) is Refusal.MALFORMED


def test_parts_arrive_at_the_same_time_unless_they_overlap() -> None:
    shard = loaded()
    shard.open(StageUpdate(0, 0, "g", 0, (0, 2)), len(some_of(0, 2)))
    with pytest.raises(RemoteFault) as caught:
        shard.open(StageUpdate(0, 0, "g", 0), len(update_of(1.0)))
    assert caught.value.refusal is Refusal.BUSY
    assert shard.open(StageUpdate(0, 0, "g", 0, (1,)), len(some_of(1)))
