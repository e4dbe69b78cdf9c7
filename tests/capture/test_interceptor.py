"""Calls of modules go to a handler: the outermost ones of each thread, and others where it does not take those."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.redirect import NOT_TAKEN, Interceptor, ModuleCall


class Inner(nn.Module):
    def forward(self, x: Tensor, name: int = 1, redirect: int = 1) -> Tensor:
        return x * name * redirect


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x, name=2) + 1
        return y


ONE = torch.ones(())


def named(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(module.named_modules())


def test_only_the_outermost_calls_are_handled() -> None:
    outer, seen = Outer(), list[str]()

    def handler(call: ModuleCall) -> Any:
        seen.append(call.name)
        return call.run() * 10

    with Interceptor(named(outer), handler):
        assert outer(ONE).item() == 30
        assert outer.inner(ONE).item() == 10
    assert seen == ["", "inner"]
    assert outer(ONE).item() == 3


@pytest.mark.parametrize("one_step", [False, True])
def test_calls_in_threads_of_a_handled_module(one_step: bool) -> None:
    """They are inside of it where one step runs at a time; else they may be another minibatch's."""
    outer, seen = Outer(), list[str]()

    def handler(call: ModuleCall) -> Any:
        seen.append(call.name)
        if call.module is not outer:
            return call.run() * 10
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(outer.inner, ONE).result()

    with Interceptor(named(outer), handler, one_step=one_step):
        assert outer(ONE).item() == (1 if one_step else 10)
    assert seen == ([""] if one_step else ["", "inner"])


def test_where_a_call_is_not_taken_the_calls_inside_are_handled() -> None:
    outer = Outer()
    with Interceptor(named(outer), lambda call: NOT_TAKEN if call.module is outer else call.run() * 10):
        assert outer(ONE).item() == 21


def test_arguments_may_have_any_name() -> None:
    inner, seen = Inner(), list[dict[str, Any]]()

    def handler(call: ModuleCall) -> Any:
        seen.append(call.kwargs)
        return NOT_TAKEN

    with Interceptor([("inner", inner)], handler):
        assert inner(ONE, name=3, redirect=2).item() == 6
    assert seen == [{"name": 3, "redirect": 2}]


def test_aside_the_module_has_its_own_forward() -> None:
    inner = Inner()

    def handler(call: ModuleCall) -> Any:
        with call.own_forward():
            assert "forward" not in vars(inner)
        assert "forward" in vars(inner)
        return call.run()

    interceptor = Interceptor([("inner", inner)], handler)
    with interceptor.suspended():
        assert "forward" not in vars(inner)
    inner(ONE)
    interceptor.remove()
    assert "forward" not in vars(inner)


def test_a_handler_that_fails_leaves_no_trace() -> None:
    inner = Inner()

    def handler(call: ModuleCall) -> Any:
        raise ArithmeticError(call.name)

    with Interceptor([("inner", inner)], handler):
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="inner"):
                inner(ONE)
    assert inner(ONE).item() == 1


def test_calls_of_another_thread_are_handled_meanwhile() -> None:
    inner, seen = Inner(), list[str]()

    def handler(call: ModuleCall) -> Any:
        seen.append(threading.current_thread().name)
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=inner, args=(ONE,), name="other")
            other.start()
            other.join(60)
        return call.run()

    with Interceptor([("inner", inner)], handler):
        inner(ONE)
    assert seen == [threading.main_thread().name, "other"]


def test_hooks_of_users_run_around_the_handler() -> None:
    inner = Inner()
    inner.register_forward_hook(lambda module, args, output: output + 1)
    with Interceptor([("inner", inner)], lambda call: call.run() * 10):
        assert inner(ONE).item() == 11
