"""Sums of gradients associate as autograd's: a tensor's uses are added one by one, the latest first, wherever user code
and pipelined modules share a tensor or a weight. Any partial sum shows in the last bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetpipe.errors import SettingError
from tests.exact.pipelines import Pinned
from tests.exact.running import assert_equal, expect, fit
from tests.oracle import Batch, Outputs
from tests.support.marks import quick, slow_except
from tests.support.models import SGD, Learner, Residual, vectors

WIDTH = 6


class Several(nn.Module):
    """Uses its input several times, in places that come one after the other."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(uses))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.norm(x)
        for part in self.parts:
            y = torch.tanh(part(y)) + x * 0.3
        return y


class Joined(nn.Module):
    """Reads its second input in every part, as a decoder does what an encoder has made."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(parts))

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        for part in self.parts:
            x = x + torch.tanh(part(torch.cat([x, memory], -1))) * memory.sigmoid()
        return x, x.mean(-1)


def sequential() -> nn.Module:
    """Its layers are run as they are, and not as a graph."""
    return nn.Sequential(Residual(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH), nn.Tanh())


Step = Callable[["Programmed", Tensor], Any]


class Programmed(Learner):
    """Its ``training_step`` is ``step``, over an embedding of the input that needs a gradient."""

    def __init__(self, step: Step, *pieces: nn.Module) -> None:
        super().__init__(SGD)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.pieces = nn.ModuleList(pieces)
        self.step = step

    def compute(self, batch: Batch) -> Outputs:
        x, _ = batch
        y = self.step(self, self.first(x))
        return {"loss": y.square().mean(), "y": y.detach()}


def check(task: Learner, in_flight: int, cuts: Sequence[int] = (0,), samples: int = 20) -> None:
    loader = vectors(samples, 4)
    expected = expect(task, loader, in_flight, max_epochs=1, stages=len(cuts))
    assert_equal(expected, fit(task, loader, strategy=Pinned(cuts, in_flight), max_epochs=1))


def made(step: Step, *pieces: Callable[[], nn.Module], seed: int = 0) -> Programmed:
    torch.manual_seed(seed)
    return Programmed(step, *(piece() for piece in pieces))


def skip(task: Programmed, h: Tensor) -> Any:
    for piece in task.pieces:
        h = h + piece(h)
    return h


CASES: list[tuple[tuple[int, ...], int]] = [((0,), 3), ((0, 2), 1), ((0, 1, 3), 3)]
across = pytest.mark.parametrize(("cuts", "in_flight"), slow_except(CASES, CASES[-1]))


@across
def test_a_skip_around_pieces(cuts: Sequence[int], in_flight: int) -> None:
    """``h = h + self.layer(h)`` where the layer uses h more than once, within a stage and on several."""
    check(made(skip, lambda: Several(2), lambda: Several(1), sequential), in_flight, cuts)


@across
def test_a_tensor_that_several_pieces_and_the_loss_use(cuts: Sequence[int], in_flight: int) -> None:
    """As an encoder's output: uses before, between and after the calls, of which one hands it on through its stages."""

    def step(task: Programmed, h: Tensor) -> Any:
        before = h.sigmoid() * h
        x, mean = task.pieces[0](h.tanh(), h)
        between = h.exp() * h
        y = task.pieces[1](h)
        return x * mean.unsqueeze(-1) + y * between + before * h + h.square()

    check(made(step, lambda: Joined(2), lambda: Several(1)), in_flight, cuts)


@across
def test_one_tensor_for_two_arguments(cuts: Sequence[int], in_flight: int) -> None:
    def step(task: Programmed, h: Tensor) -> Any:
        x, _ = task.pieces[0](h, h)
        return x + h

    check(made(step, lambda: Joined(3)), in_flight, cuts)


class Twice(nn.Module):
    """Gives one tensor twice, as a last hidden state that is also the last of all hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Several(1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, object]:
        hidden = [self.one(x)]
        hidden.append(torch.tanh(self.other(hidden[0])))
        return {"last": hidden[-1], "hidden": hidden}


@across
def test_one_tensor_in_two_places_of_an_output(cuts: Sequence[int], in_flight: int) -> None:
    def step(task: Programmed, h: Tensor) -> Any:
        out = task.pieces[0](h)
        last, hidden = out["last"], out["hidden"]
        y = last * hidden[1].exp() + hidden[0].tanh() * last + hidden[1].sin() * last.cos()
        return y

    check(made(step, Twice), in_flight, cuts)


@across
def test_weights_that_pieces_and_user_code_use(cuts: Sequence[int], in_flight: int) -> None:
    """A weight's uses in user code were added up region by region: before, between and after the calls."""

    def step(task: Programmed, h: Tensor) -> Any:
        first, second = task.pieces
        one, other = first.parts[0].weight, second.parts[0].weight  # type: ignore[union-attr, index]
        h = F.linear(h, one) + F.linear(h.sin(), one) + F.linear(h, other)
        h = first(h)
        h = F.linear(h, one) * F.linear(h.cos(), one) + F.linear(h, other)
        h = second(h)
        return F.linear(h, one) + F.linear(h.tanh(), one) + F.linear(h, other).sigmoid() * F.linear(h, other)

    check(made(step, lambda: Several(2), lambda: Several(1)), in_flight, cuts)


def test_what_is_asked_of_the_tensor_itself_sees_all_its_uses() -> None:
    """A hook that user code puts on a tensor after it was given to a piece gets its whole gradient."""
    seen: dict[bool, list[Tensor]] = {True: [], False: []}

    def step(task: Programmed, h: Tensor) -> Any:
        y = h + task.pieces[0](h)
        assert h.requires_grad
        assert h.grad_fn is not None
        hook: Any = h.register_hook  # torch has no types here
        hook(seen[hasattr(task, "_trainer") and task._trainer is not None].append)
        return y * h

    check(made(step, lambda: Several(1)), 3)
    assert len(seen[True]) == len(seen[False]) > 0
    assert all(map(torch.equal, seen[False], seen[True]))


class Shifts(nn.Module):
    """Keeps nothing of its input for its backward, so that the input may change afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(x + self.bias) + self.linear(x * 0.5)
        return y


def test_a_tensor_that_is_changed_in_place_after_the_call() -> None:
    def step(task: Programmed, h: Tensor) -> Any:
        h = h * 1.0
        y = task.pieces[0](h)
        h += y
        z = task.pieces[1](h)
        h[:, 0] = y[:, 1]
        h.mul_(2.0)
        return y * y + z * h

    check(made(step, lambda: nn.Sequential(Shifts(), nn.Tanh()), lambda: nn.Sequential(Shifts())), 3, (0, 2))


def test_views_of_a_tensor_that_is_changed_in_place_after_the_call() -> None:
    """The stand-in's history is the tensor's, and so its views': their gradients left the change out."""

    def step(task: Programmed, h: Tensor) -> Any:
        h = h * 1.0
        half = h[:, :3]
        y = task.pieces[0](h)
        h.mul_(2.0)
        h[:, 0] += 1
        assert h.contiguous() is h
        return y + h + torch.cat([half, half], 1).cos()

    check(made(step, lambda: nn.Sequential(Shifts(), nn.Tanh())), 3, (0, 1))


def _change_a_view(h: Tensor) -> tuple[Tensor, Tensor]:
    h = h * 1.0
    return h, h[:, :3]


def _change_what_it_is_a_view_of(h: Tensor) -> tuple[Tensor, Tensor]:
    whole = torch.cat([h, h], 1)
    return whole[:, :WIDTH], whole


@pytest.mark.parametrize("tensors", [_change_a_view, _change_what_it_is_a_view_of])
def test_a_change_in_place_by_way_of_another_tensor_is_refused(tensors: Callable[[Tensor], Any]) -> None:
    """The stand-in led past it: gradients were wrong."""

    def step(task: Programmed, h: Tensor) -> Any:
        h, other = tensors(h)
        y = task.pieces[0](h)
        other.mul_(2.0)
        return y * h.sin()

    with pytest.raises(SettingError, match="changed in place meanwhile by way of another tensor"):
        check(made(step, lambda: nn.Sequential(Shifts(), nn.Tanh())), 3, (0, 1))


def test_a_gradient_inside_the_step_beside_a_call() -> None:
    """A penalty on a tensor that was given to a piece, of which the piece is no part."""

    def step(task: Programmed, h: Tensor) -> Any:
        y = task.pieces[0](h)
        slope: Any = torch.autograd.grad((h.sin() * h).sum(), h, create_graph=True)  # torch has no types here
        return y * h + slope[0].square()

    check(made(step, lambda: Several(2)), 3, (0, 1))


class Reverse(torch.autograd.Function):
    """The identity, whose gradient has the other sign, as in domain-adversarial training."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


@across
def test_a_function_of_the_users_own(cuts: Sequence[int], in_flight: int) -> None:
    """Torch tells no mode of ``Function.apply``: it was given no stand-in, so that a sum was rounded twice."""

    def step(task: Programmed, h: Tensor) -> Any:
        classes = task.pieces[0](h)
        reverse: Any = Reverse.apply
        return classes + h.sin() + task.pieces[1](reverse(h))

    check(made(step, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), sequential), in_flight, cuts)


def test_an_input_that_is_made_of_another_one() -> None:
    """Their gradients flow together before the call: the graph seemed to have other ones than the module."""

    def step(task: Programmed, h: Tensor) -> Any:
        return task.pieces[0](h.cos(), h)[0]

    strategy, loader = Pinned((0, 1), 3), vectors(20, 4)
    task = made(step, lambda: Joined(2))
    assert_equal(expect(task, loader, 3, max_epochs=1), fit(task, loader, strategy=strategy, max_epochs=1))
    assert not strategy.last_run.taken_apart


def program(seed: int) -> Step:
    """A random ``training_step``: pieces, some of them several times, skips and weights in a random order."""

    def step(task: Programmed, h: Tensor) -> Any:
        chance = random.Random(seed)
        values = [h]
        waiting = [piece for piece in task.pieces for _ in range(chance.choice([1, 1, 2, 3]))]
        chance.shuffle(waiting)
        while waiting or chance.random() < 0.7:
            one, other = chance.choice(values), chance.choice(values)
            match chance.randrange(6):
                case 0 | 1 if waiting:
                    piece = waiting.pop(0)
                    found = piece(one, other)[0] if isinstance(piece, Joined) else piece(one)
                    values.append(found)
                case 2:
                    values.append(one + other)
                case 3:
                    values.append(one * other.sigmoid())
                case 4:
                    of = task.pieces[chance.randrange(len(task.pieces))]
                    weight = next(each for each in of.parameters() if each.ndim == 2)
                    values.append(torch.tanh(F.linear(one, weight[:, :WIDTH])))
                case 5:
                    values.append(torch.cos(one))
        return torch.stack([value.sin() for value in values]).mean(0)

    return step


def check_program(seed: int) -> None:
    chance = random.Random(-seed - 1)
    kinds: list[Callable[[], nn.Module]] = [lambda: Several(2), lambda: Joined(2), sequential]
    pieces = [chance.choice(kinds) for _ in range(chance.randint(1, 3))]
    task = made(program(seed), *pieces, seed=seed)
    fewest = 2 * len(pieces)  # layers: each piece has at least as many
    cuts = (0, *sorted(chance.sample(range(1, fewest), chance.randint(0, min(3, fewest - 1)))))
    check(task, chance.choice([1, 2, 4]), cuts, samples=18)


@quick("0", "2")
@pytest.mark.parametrize("seed", range(4))
def test_random_programs(seed: int) -> None:
    check_program(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 50))
def test_more_random_programs(seed: int) -> None:
    check_program(seed)
