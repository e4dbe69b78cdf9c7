"""A method is replaced for a while; copies of its owner know nothing of that."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.redirect import Redirect


class Doubler(nn.Module):
    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        return x * times


def negative(redirect: Redirect, x: Tensor, times: int = 2) -> Tensor:
    """A handler, which calls what it stands in for."""
    y: Tensor = redirect.original(x, times=times)
    return -y


ONE = torch.ones(1)


def test_the_handler_is_called_until_it_is_removed() -> None:
    module = Doubler()
    redirect = Redirect(module, "forward", negative)
    assert module(ONE).item() == -2
    assert module(ONE, times=3).item() == -3
    redirect.remove()
    assert module(ONE).item() == 2
    assert "forward" not in vars(module)


def test_the_original_stays_callable() -> None:
    module = Doubler()
    redirect = Redirect(module, "forward", negative)
    assert redirect.original(ONE, times=5).item() == 5
    redirect.remove()


def test_removing_twice_does_nothing_more() -> None:
    module = Doubler()
    redirect = Redirect(module, "forward", negative)
    redirect.remove()
    redirect.remove()
    assert module(ONE).item() == 2


def test_what_the_user_had_put_there_comes_back() -> None:
    module = Doubler()
    own = functools.partial(Doubler.forward, module)
    vars(module)["forward"] = own
    redirect = Redirect(module, "forward", negative)
    assert redirect.original is own
    assert module(ONE).item() == -2
    redirect.remove()
    assert vars(module)["forward"] is own


def test_what_somebody_else_put_there_meanwhile_stays() -> None:
    module = Doubler()
    redirect = Redirect(module, "forward", negative)
    theirs = functools.partial(Doubler.forward, module)
    vars(module)["forward"] = theirs
    redirect.remove()
    assert vars(module)["forward"] is theirs


def test_a_deep_copy_runs_its_own_method() -> None:
    owner = nn.ModuleDict({"inner": Doubler()})
    redirect = Redirect(owner["inner"], "forward", negative)
    copied: Any = copy.deepcopy(owner)["inner"]
    redirect.remove()
    assert copied(ONE).item() == 2
    assert copied.forward.__self__ is copied


def test_a_pickle_runs_its_own_method() -> None:
    module = nn.Sequential(Doubler(), nn.Linear(1, 1))
    redirect = Redirect(module, "forward", negative)
    loaded: Any = pickle.loads(pickle.dumps(module))
    redirect.remove()
    assert torch.equal(loaded(ONE), module(ONE))
    assert loaded.forward.__self__ is loaded


def test_torch_saves_it_as_a_plain_module() -> None:
    module = Doubler()
    redirect = Redirect(module, "forward", negative)
    file = io.BytesIO()
    torch.save(module, file)
    redirect.remove()
    file.seek(0)
    loaded: Any = torch.load(file, weights_only=False)
    assert loaded(ONE).item() == 2
