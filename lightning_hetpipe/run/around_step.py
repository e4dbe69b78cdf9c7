"""Contexts around an optimizer's step: around all of it, and around what it computes once its closure is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.lightning_private import has_step_hooks, run_first


class AroundStep:
    """Something that is opened around steps."""

    @property
    def is_secret(self) -> bool:
        """True if user code is not to see what the next step computes with, and waits until it is over."""
        return False

    def asked(self) -> AbstractContextManager[None]:
        """Open around a step that is asked for, and may be skipped."""
        return nullcontext()

    def stepping(self) -> AbstractContextManager[None]:
        """Open around what a step computes."""
        return nullcontext()


@contextmanager
def around_step(optimizer: torch.optim.Optimizer, those: Sequence[AroundStep]) -> Iterator[None]:
    """Have ``those`` open around the step of ``optimizer`` within it, the first outermost."""
    with (
        _all(each.asked() for each in those),
        after_closure(optimizer, lambda: _all(each.stepping() for each in those)),
    ):
        yield


@contextmanager
def _all(those: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in those:
            stack.enter_context(each)
        yield


def check_hooks(optimizer: torch.optim.Optimizer, setting: str) -> None:
    """Refuses an optimizer of which nobody can tell when its closure has returned.

    Raises:
        SettingError: which names ``setting``.
    """
    if not has_step_hooks(optimizer):
        raise SettingError(
            f"{setting} looks at what an optimizer's step computes, and {type(optimizer).__name__} takes no hooks, as"
            " it does not call torch.optim.Optimizer.__init__; have it do so, or leave the setting out"
        )


@contextmanager
def after_closure(
    optimizer: torch.optim.Optimizer, stepping: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Have ``optimizer.step``, within it, open ``stepping`` once its closure has returned, for what it computes.

    Until then hooks and gradient clipping run, as Lightning calls them inside of the closure. Where a subclass calls
    ``super().step``, torch runs hooks for both, and what the subclass computes is part of the step.
    """
    if not has_step_hooks(optimizer):  # nobody says when its closure has returned
        yield
        return
    released, depth = ExitStack(), 0

    def free_after_closure(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal depth
        depth += 1
        if depth > 1:
            return None
        closure = kwargs.get("closure")
        if closure is None:  # a loss scaler has called it
            released.enter_context(stepping())
            return None

        def run() -> Any:
            result = closure()
            released.enter_context(stepping())
            return result

        return args, {**kwargs, "closure": run}

    def stepped(*_: Any) -> None:
        nonlocal depth
        depth -= 1
        if not depth:
            released.close()

    before = optimizer.register_step_pre_hook(free_after_closure)
    after = optimizer.register_step_post_hook(stepped)
    run_first(optimizer, after)  # other post hooks are user code
    try:
        yield
    finally:
        released.close()
        before.remove()
        after.remove()
