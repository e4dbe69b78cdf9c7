"""The weight stash: Nm buffers made once, one for each version that differs from the one before."""

from __future__ import annotations

import copy
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.stage_messages import Move, Version
from lightning_hetpipe.pipeline.weight_stash import Live, WeightStash
from lightning_hetpipe.rules.versions import STASH, Reading, Versions
from lightning_hetpipe.torch_private.tensors import pytree
from tests.support.equality import assert_same
from tests.support.marks import explores

CPU = torch.device("cpu")
VERSIONS = weakref.WeakKeyDictionary[WeightStash, Versions]()


def live_layers() -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)])


def message(stash: WeightStash, live: nn.ModuleList, version: int) -> Version:
    return Live([list(live)]).version(version, VERSIONS[stash].needed(version))


def begin(stash: WeightStash, live: nn.ModuleList, version: int) -> None:
    VERSIONS[stash] = Versions(STASH, len(stash.buffers), empty_at=version)
    stash.begin(message(stash, live, version))


def publish(stash: WeightStash, live: nn.ModuleList, version: int) -> None:
    stash.publish(message(stash, live, version))


def begun(size: int) -> tuple[nn.ModuleList, WeightStash]:
    live = live_layers()
    stash = WeightStash(live, size, CPU)
    begin(stash, live, 0)
    return live, stash


def step(live: nn.ModuleList, by: float = 1.0) -> None:
    """Change of weights as an optimizer makes it."""
    with torch.no_grad():
        for parameter in live.parameters():
            parameter.add_(by)


def held(stash: WeightStash, version: int) -> list[Tensor]:
    return [tensor.clone() for tensor in stash.buffer(Reading(version)).tensors]


def copies(live: nn.ModuleList) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in live.parameters()]


def addresses(stash: WeightStash) -> list[list[int]]:
    return [[tensor.data_ptr() for tensor in buffer.tensors] for buffer in stash.buffers]


def test_a_version_keeps_the_weights_that_it_was_published_with() -> None:
    live, stash = begun(3)
    published = {0: copies(live)}
    for version in (1, 2):
        step(live)
        publish(stash, live, version)
        published[version] = copies(live)
    step(live)
    for version, weights in published.items():
        assert_same(held(stash, version), weights)
    assert len({id(stash.buffer(Reading(version))) for version in published}) == 3


@explores(30)
@given(st.integers(1, 5), st.lists(st.booleans(), min_size=1, max_size=25), st.integers(0, 9))
def test_every_minibatch_in_flight_finds_its_version(in_flight: int, changes: list[bool], empty_at: int) -> None:
    """Over many steps, of which some change nothing (accumulated gradients, a skipped step)."""
    live = nn.ModuleList([nn.Linear(2, 1)])
    stash = WeightStash(live, in_flight, CPU)
    before = addresses(stash)
    begin(stash, live, empty_at)
    weights = {empty_at: copies(live)}
    for version, changed in enumerate(changes, start=empty_at + 1):
        if changed:
            step(live)
        publish(stash, live, version)
        weights[version] = copies(live)
        for minibatch in range(version + 1, version + 1 + in_flight):
            uses = VERSIONS[stash].version(minibatch)
            assert_same(held(stash, uses), weights[uses])
        if in_flight > 1:
            assert (stash.buffer(Reading(version)) is stash.buffer(Reading(version - 1))) == (not changed)
    assert addresses(stash) == before


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_nothing_is_allocated_after_the_start(in_flight: int) -> None:
    live = live_layers()
    stash = WeightStash(live, in_flight, CPU)
    before, buffers = addresses(stash), list(stash.buffers)
    assert len(buffers) == in_flight
    assert len({address for buffer in before for address in buffer}) == in_flight * len(list(live.parameters()))
    begin(stash, live, 0)
    for version in range(1, 20):
        step(live)
        publish(stash, live, version)
    begin(stash, live, 19)
    assert addresses(stash) == before
    assert stash.buffers == buffers


def test_buffers_share_no_memory_with_the_live_weights() -> None:
    live, stash = begun(2)
    before = held(stash, 0)
    step(live)
    assert_same(held(stash, 0), before)


def test_a_version_without_a_change_shares_the_buffer() -> None:
    live, stash = begun(3)
    for version in range(1, 10):
        publish(stash, live, version)
        assert stash.buffer(Reading(version)) is stash.buffer(Reading(version - 1))
    step(live)
    publish(stash, live, 10)
    assert stash.buffer(Reading(10)) is not stash.buffer(Reading(9))


@pytest.mark.parametrize("changed", ["nothing", "data", "momentum", "rate", "steps"])
def test_predictions_that_are_equal_share_a_buffer(changed: str) -> None:
    live = nn.ModuleList([nn.Linear(2, 1)])
    stash = WeightStash(live, 1, CPU)
    momenta = {parameter: torch.ones_like(parameter, requires_grad=False) for parameter in live.parameters()}
    readings = [Reading(0, 2), Reading(1, 3 if changed == "steps" else 2)]

    def version(number: int, rate: float) -> Version:
        moves = {parameter: Move(momentum, -rate) for parameter, momentum in momenta.items()}
        return Live([list(live)]).version(number, readings[: number + 1], moves)

    stash.begin(version(0, 0.5))
    before = copies(live)
    if changed == "data":
        live[0].get_parameter("bias").data.add_(1.0)
    elif changed == "momentum":
        next(iter(momenta.values())).add_(1.0)
    stash.publish(version(1, 0.25 if changed == "rate" else 0.5))
    assert (stash.buffer(readings[0]) is stash.buffer(readings[1])) == (changed == "nothing")
    assert_same(stash.buffer(readings[0]).tensors, [weights - 1.0 for weights in before])
    rate, steps = (0.25 if changed == "rate" else 0.5), readings[1].steps
    expected = [each.detach() - steps * rate * momenta[each] for each in live.parameters()]
    torch.testing.assert_close(stash.buffer(readings[1]).tensors, expected)


def test_changes_through_data_are_noticed() -> None:
    """``.data`` leaves no mark on the version counter."""
    live, stash = begun(2)
    first = next(live.parameters())
    counter = first._version
    first.data.mul_(2.0)
    assert first._version == counter
    publish(stash, live, 1)
    assert stash.buffer(Reading(1)) is not stash.buffer(Reading(0))
    assert_same(held(stash, 1), copies(live))


def test_a_weight_that_was_replaced_through_data_is_noticed() -> None:
    live, stash = begun(2)
    first = next(live.parameters())
    first.data = torch.full_like(first, 5.0)
    publish(stash, live, 1)
    assert_same(held(stash, 1), copies(live))


def test_beginning_anew_forgets_older_versions() -> None:
    live, stash = begun(2)
    step(live)
    publish(stash, live, 1)
    step(live)
    begin(stash, live, 1)
    assert_same(held(stash, 1), copies(live))
    with pytest.raises(KeyError):
        stash.buffer(Reading(0))


def test_frozen_parameters_and_modes_belong_to_a_version() -> None:
    live, stash = begun(3)
    live[0].requires_grad_(False)
    live[1].eval()
    publish(stash, live, 1)
    assert stash.buffer(Reading(1)) is not stash.buffer(Reading(0))
    live[0].requires_grad_(True)
    publish(stash, live, 2)
    flags = []
    for version in range(3):
        layers = stash.layers
        stash.bind(Reading(version))
        weight = layers[0].get_parameter("weight")
        flags.append((weight.requires_grad, layers[1].training, layers[2].training))
    assert flags == [(True, True, True), (False, False, True), (True, False, True)]


def shares(stash: WeightStash, one: int, other: int) -> list[bool]:
    """True for each weight that two versions hold in the same memory."""
    pairs = zip(stash.buffer(Reading(one)).tensors, stash.buffer(Reading(other)).tensors, strict=True)
    return [first is second for first, second in pairs]


def partly_frozen(size: int) -> tuple[nn.ModuleList, WeightStash]:
    """The first layer's bias is trained, its weight is not."""
    live = live_layers()
    live[0].get_parameter("weight").requires_grad_(False)
    stash = WeightStash(live, size, CPU)
    begin(stash, live, 0)
    return live, stash


def train(live: nn.ModuleList) -> None:
    with torch.no_grad():
        for parameter in live.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)


def test_versions_share_frozen_weights() -> None:
    live, stash = partly_frozen(3)
    frozen = stash.buffer(Reading(0)).tensors[0]
    assert len({buffer.tensors[0].data_ptr() for buffer in stash.buffers}) == 1
    published = {0: copies(live)}
    for version in (1, 2):
        train(live)
        publish(stash, live, version)
        published[version] = copies(live)
    for version, weights in published.items():
        assert_same(held(stash, version), weights)
    assert shares(stash, 0, 2) == [True, False, False, False, False, False]
    assert frozen is stash.buffer(Reading(2)).tensors[0]
    assert frozen.data_ptr() != live[0].get_parameter("weight").data_ptr()
    trained = sum(stash.bytes[1:])
    assert stash.held_bytes == 3 * trained + stash.bytes[0]


@pytest.mark.parametrize("through_data", [False, True])
def test_a_frozen_weight_that_a_callback_changes_is_another_one_from_then_on(through_data: bool) -> None:
    live, stash = partly_frozen(3)
    weight = live[0].get_parameter("weight")
    published = {0: copies(live)}
    made = []
    for version in (1, 2):
        if version == 1:
            (weight.data if through_data else weight.detach()).mul_(0.5)
        made.append(stash.publish(message(stash, live, version)))
        published[version] = copies(live)
    for version, weights in published.items():
        assert_same(held(stash, version), weights)
    assert [len(each) for each in made] == [1, 0]  # for the stage's stream, which is to be told of it
    assert stash.buffer(Reading(1)) is stash.buffer(Reading(2))
    stash.bind(Reading(0))
    assert torch.equal(stash.parameters[0], published[0][0])
    stash.bind(Reading(2))
    assert torch.equal(stash.parameters[0], published[2][0])


def test_a_weight_that_is_trained_from_now_on_has_a_copy_in_each_version() -> None:
    """And one that is frozen from now on has one for all."""
    live, stash = partly_frozen(2)
    for version in range(1, 9):
        live[0].get_parameter("weight").requires_grad_(3 <= version < 6)
        train(live)
        publish(stash, live, version)
        assert_same(held(stash, version), copies(live))
        stash.bind(Reading(version))
        assert_same([each.detach() for each in stash.parameters], copies(live))
        if version in (4, 5):
            assert not any(shares(stash, version - 1, version))
        elif version in (2, 7, 8):
            assert shares(stash, version - 1, version)[0]


def test_layers_follow_the_flags_when_a_buffer_is_used_again() -> None:
    live = live_layers()
    stash = WeightStash(live, 1, CPU)
    for version, training in enumerate([True, False, True]):
        live.train(training)
        begin(stash, live, version) if version == 0 else publish(stash, live, version)
        stash.bind(Reading(version))
        assert all(module.training == training for layer in stash.layers for module in layer.modules())


def test_tied_weights_stay_tied() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    live = nn.ModuleList([first, second])
    stash = WeightStash(live, 2, CPU)
    first.weight.requires_grad_(False)
    begin(stash, live, 0)
    stash.bind(Reading(0))
    one, other = (layer.get_parameter("weight") for layer in stash.layers)
    assert one is other
    assert torch.equal(one, first.weight)
    assert not one.requires_grad
    assert len(stash.parameters) == 3


class Holding(nn.Module):
    """Holds a weight in a list, too, as RNNs do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.listed = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.listed[0]


def test_layers_are_those_of_the_version_that_is_bound() -> None:
    live, stash = begun(3)
    x, expected = torch.randn(4, 3), {}
    for version in range(3):
        step(live, 0.5)
        publish(stash, live, version + 1)
        expected[version + 1] = nn.Sequential(*live)(x).detach()
    for version in (3, 1, 2, 1, 3):
        stash.bind(Reading(version))
        assert torch.equal(nn.Sequential(*stash.layers)(x), expected[version])


def test_whoever_else_holds_a_weight_sees_the_bound_version() -> None:
    for layer, x in ((Holding(), torch.ones(2)), (nn.LSTM(3, 2, 2), torch.ones(4, 3))):
        live = nn.ModuleList([layer])
        stash = WeightStash(live, 2, CPU)
        begin(stash, live, 0)
        before = layer(x)
        step(live)
        publish(stash, live, 1)
        for version, expected in ((0, before), (1, layer(x)), (0, before)):
            stash.bind(Reading(version))
            found = stash.layers[0](x)
            assert_same([*pytree.tree_leaves(found)], [*pytree.tree_leaves(expected)])


def test_a_backward_uses_the_version_of_its_forward_when_that_is_bound_again() -> None:
    """Though another forward has run in between on the same layers, and its version was frozen."""
    live = nn.ModuleList([Holding()])
    stash = WeightStash(live, 2, CPU)
    begin(stash, live, 0)
    stash.bind(Reading(0))
    output = stash.layers[0](torch.ones(2))
    step(live)
    live.requires_grad_(False)
    publish(stash, live, 1)
    stash.bind(Reading(1))
    assert not stash.layers[0](torch.ones(2)).requires_grad
    stash.bind(Reading(0))
    (gradient,) = torch.autograd.grad(output.sum(), stash.parameters)
    assert gradient.tolist() == [2.0, 2.0]


def test_a_parameter_of_a_version_is_a_leaf_of_its_own() -> None:
    live, stash = begun(2)
    live[0].requires_grad_(False)
    step(live)
    publish(stash, live, 1)
    for version in (0, 1):
        found = stash.parameter(0, Reading(version))
        assert found.is_leaf
        assert found.requires_grad == (version == 0)
        assert torch.equal(found, stash.buffer(Reading(version)).tensors[0])
        assert found is not stash.parameters[0]


def test_letting_go_gives_back_all_memory() -> None:
    _, stash = begun(3)
    blocks = [weakref.ref(tensor.untyped_storage()) for buffer in stash.buffers for tensor in buffer.tensors]
    stash.let_go()
    assert not any(block() for block in blocks)
    assert sum(parameter.numel() for parameter in stash.layers.parameters()) == 0


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
    stash = WeightStash(live, 2, CPU)
    begin(stash, live, 0)
    publish(stash, live, 1)
    assert all(torch.equal(tensor, state[name]) for name, tensor in live.state_dict().items())
