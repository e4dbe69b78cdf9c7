"""The optimizer's step, during which other user code may run (law L8)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lightning_hetpipe.lightning_private import run_first
from lightning_hetpipe.pipeline.engine import Engine


@contextmanager
def released_step(engine: Engine, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Have ``optimizer.step``, within it, give the lock over user code away once its closure has returned.

    Until then hooks and gradient clipping run, as Lightning calls them inside of the closure.
    """
    released = ExitStack()

    def free_after_closure(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure")
        if closure is None:  # a loss scaler has called it
            released.enter_context(engine.computing())
            return None

        def run() -> Any:
            result = closure()
            released.enter_context(engine.computing())
            return result

        return args, {**kwargs, "closure": run}

    before = optimizer.register_step_pre_hook(free_after_closure)
    after = optimizer.register_step_post_hook(lambda *_: released.close())
    run_first(optimizer, after)  # other post hooks are user code
    try:
        yield
    finally:
        released.close()
        before.remove()
        after.remove()
