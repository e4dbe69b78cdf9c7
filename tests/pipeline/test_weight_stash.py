"""The version ring: Nm slots made once, one for each version that differs from the one before."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.live import Live
from lightning_hetpipe.pipeline.weight_stash import WeightStash
from lightning_hetpipe.rules.versions import version_of

CPU = torch.device("cpu")


def live_layers() -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)])


def begin(ring: WeightStash, live: nn.ModuleList, version: int) -> None:
    now = Live([list(live)]).version(version)
    ring.begin(version, now.parameters, now.flags)


def publish(ring: WeightStash, live: nn.ModuleList, version: int) -> None:
    now = Live([list(live)]).version(version)
    ring.publish(version, now.parameters, now.flags)


def begun(slots: int) -> tuple[nn.ModuleList, WeightStash]:
    live = live_layers()
    ring = WeightStash(live, slots, CPU)
    begin(ring, live, 0)
    return live, ring


def step(live: nn.ModuleList, by: float = 1.0) -> None:
    """What an optimizer does."""
    with torch.no_grad():
        for parameter in live.parameters():
            parameter.add_(by)


def held(ring: WeightStash, version: int) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in ring.slots[ring.place(version)].parameters]


def copies(live: nn.ModuleList) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in live.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def addresses(ring: WeightStash) -> list[list[int]]:
    return [[parameter.data_ptr() for parameter in slot.parameters] for slot in ring.slots]


def test_a_version_keeps_the_weights_that_it_was_published_with() -> None:
    live, ring = begun(3)
    published = {0: copies(live)}
    for version in (1, 2):
        step(live)
        publish(ring, live, version)
        published[version] = copies(live)
    step(live)
    for version, weights in published.items():
        assert same(held(ring, version), weights)
    assert len({ring.place(version) for version in published}) == 3


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.lists(st.booleans(), min_size=1, max_size=25), st.integers(0, 9))
def test_every_minibatch_in_flight_finds_its_version(in_flight: int, changes: list[bool], empty_at: int) -> None:
    """Over many steps, of which some change nothing (accumulated gradients, a skipped step)."""
    live = nn.ModuleList([nn.Linear(2, 1)])
    ring = WeightStash(live, in_flight, CPU)
    before = addresses(ring)
    begin(ring, live, empty_at)
    weights = {empty_at: copies(live)}
    for version, changed in enumerate(changes, start=empty_at + 1):
        if changed:
            step(live)
        publish(ring, live, version)
        weights[version] = copies(live)
        for minibatch in range(version + 1, version + 1 + in_flight):
            uses = version_of(minibatch, in_flight, empty_at)
            assert same(held(ring, uses), weights[uses])
        if in_flight > 1:
            assert (ring.place(version) == ring.place(version - 1)) == (not changed)
    assert addresses(ring) == before


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_nothing_is_allocated_after_the_start(in_flight: int) -> None:
    live = live_layers()
    ring = WeightStash(live, in_flight, CPU)
    before, slots = addresses(ring), list(ring.slots)
    assert len(slots) == in_flight
    assert len({address for slot in before for address in slot}) == in_flight * len(list(live.parameters()))
    begin(ring, live, 0)
    for version in range(1, 20):
        step(live)
        publish(ring, live, version)
    begin(ring, live, 19)
    assert addresses(ring) == before
    assert ring.slots == slots


def test_slots_share_no_memory_with_the_live_weights() -> None:
    live, ring = begun(2)
    before = held(ring, 0)
    step(live)
    assert same(held(ring, 0), before)


def test_a_version_without_a_change_shares_the_slot() -> None:
    live, ring = begun(3)
    for version in range(1, 10):
        publish(ring, live, version)
        assert ring.place(version) == ring.place(version - 1)
    step(live)
    publish(ring, live, 10)
    assert ring.place(10) != ring.place(9)


def test_changes_through_data_are_noticed() -> None:
    """``.data`` leaves no mark on the version counter."""
    live, ring = begun(2)
    first = next(live.parameters())
    counter = first._version
    first.data.mul_(2.0)
    assert first._version == counter
    publish(ring, live, 1)
    assert ring.place(1) != ring.place(0)
    assert same(held(ring, 1), copies(live))


def test_a_weight_that_was_replaced_through_data_is_noticed() -> None:
    live, ring = begun(2)
    first = next(live.parameters())
    first.data = torch.full_like(first, 5.0)
    publish(ring, live, 1)
    assert same(held(ring, 1), copies(live))


def test_beginning_anew_forgets_older_versions() -> None:
    live, ring = begun(2)
    step(live)
    publish(ring, live, 1)
    step(live)
    begin(ring, live, 1)
    assert same(held(ring, 1), copies(live))
    with pytest.raises(KeyError):
        ring.place(0)


def test_frozen_parameters_and_modes_belong_to_a_version() -> None:
    live, ring = begun(3)
    live[0].requires_grad_(False)
    live[1].eval()
    publish(ring, live, 1)
    assert ring.place(1) != ring.place(0)
    live[0].requires_grad_(True)
    publish(ring, live, 2)
    flags = []
    for version in range(3):
        layers = ring.slots[ring.place(version)].layers
        weight = layers[0].get_parameter("weight")
        flags.append((weight.requires_grad, layers[1].training, layers[2].training))
    assert flags == [(True, True, True), (False, False, True), (True, False, True)]


def test_slots_follow_the_flags_when_they_are_used_again() -> None:
    live = live_layers()
    ring = WeightStash(live, 1, CPU)
    for version, training in enumerate([True, False, True]):
        live.train(training)
        begin(ring, live, version) if version == 0 else publish(ring, live, version)
        assert all(m.training == training for layer in ring.slots[0].layers for m in layer.modules())


def test_tied_weights_stay_tied() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    live = nn.ModuleList([first, second])
    ring = WeightStash(live, 2, CPU)
    first.weight.requires_grad_(False)
    begin(ring, live, 0)
    slot = ring.slots[ring.place(0)]
    one, other = (layer.get_parameter("weight") for layer in slot.layers)
    assert one is other
    assert torch.equal(one, first.weight)
    assert not one.requires_grad
    assert len(slot.parameters) == 3


def test_layers_that_cannot_be_copied_are_refused() -> None:
    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    with pytest.raises(SettingError, match=r"cannot be copied for weight stashing .*; give them only attributes"):
        WeightStash(nn.ModuleList([Locked()]), 2, CPU)


def test_the_live_layers_are_not_changed() -> None:
    live = live_layers()
    state = copy.deepcopy(live.state_dict())
    ring = WeightStash(live, 2, CPU)
    begin(ring, live, 0)
    publish(ring, live, 1)
    assert all(torch.equal(tensor, state[name]) for name, tensor in live.state_dict().items())
