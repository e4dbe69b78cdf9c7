"""Around an optimizer's step: gradients are delivered before it, and contexts are open around it.

A context is around the whole step, or around its computation after the closure returned. One of them corrects learning
rates at the start of training, when stale gradients do most harm (PipeMare, 2021: T1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.lightning_private import has_step_hooks, run_first
from lightning_hetpipe.run.lifecycle import opened
from lightning_hetpipe.torch_private.tensors import address_of, has_gradient_hooks


def deliver(gradients: Mapping[nn.Parameter, Tensor], factor: float = 1.0) -> None:
    """Add ``gradients``, times ``factor``, to ``.grad``, and run hooks of the parameters."""
    taken: set[int] = set()
    for parameter, gradient in gradients.items():
        if not parameter.requires_grad:  # a callback froze it meanwhile
            continue
        if gradient.device != parameter.device:
            gradient = gradient.to(parameter.device)
        if factor != 1.0:
            gradient = gradient * factor  # not in place: autograd may use one tensor for several gradients
        if has_gradient_hooks(parameter):
            torch.autograd.backward(parameter, gradient)
        elif parameter.grad is None:
            parameter.grad = _own(gradient, parameter, taken)
        else:
            with torch.no_grad():
                parameter.grad += gradient


def _own(gradient: Tensor, parameter: nn.Parameter, taken: set[int]) -> Tensor:
    """Return ``gradient`` in its own memory, in the parameter's layout: autograd may use one tensor for several."""
    if gradient.layout is not torch.strided:
        return gradient
    memory = address_of(gradient)
    if memory in taken or gradient.stride() != parameter.stride():
        return torch.empty_like(parameter, requires_grad=False).copy_(gradient)
    if memory is not None:  # None at a host, which has seen to it
        taken.add(memory)
    # Not a view, as a linear layer's gradient is: `module.cpu()` would leave the base of the view on the device.
    return gradient.data


class AroundStep:
    """Contexts around optimizer steps."""

    @property
    def is_secret(self) -> bool:
        """True if user code must not see the values with which the next step computes: it waits meanwhile."""
        return False

    def asked(self) -> AbstractContextManager[None]:
        """Open a context around a requested step, which may be skipped."""
        return nullcontext()

    def stepping(self) -> AbstractContextManager[None]:
        """Open a context around the computation of a step."""
        return nullcontext()


@contextmanager
def around_step(optimizer: torch.optim.Optimizer, those: Sequence[AroundStep]) -> Iterator[None]:
    """Context manager in which the contexts ``those`` are open around the optimizer's step, the first outermost."""
    with (
        opened(each.asked() for each in those),
        after_closure(optimizer, lambda: opened(each.stepping() for each in those)),
    ):
        yield


def check_hooks(optimizer: torch.optim.Optimizer, setting: str) -> None:
    """Raise SettingError, naming ``setting``, if ``optimizer`` has no hooks, which show when its closure has ended."""
    if not has_step_hooks(optimizer):
        raise SettingError(
            f"{setting} looks at what an optimizer's step computes, and {type(optimizer).__name__} takes no hooks, as"
            " it does not call torch.optim.Optimizer.__init__; have it do so, or leave the setting out"
        )


@contextmanager
def after_closure(
    optimizer: torch.optim.Optimizer, stepping: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Context manager in which ``optimizer.step`` opens ``stepping`` after its closure, around its computation. Before
    that, within the closure, Lightning calls hooks and clips gradients. If a subclass calls ``super().step``, torch
    runs hooks for both steps, and the computation of the subclass is part of the step."""
    if not has_step_hooks(optimizer):  # nobody says when its closure has returned
        yield
        return
    released, depth = ExitStack(), 0

    def free_after_closure(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal depth
        depth += 1
        if depth > 1:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:  # a loss scaler has called it
            released.enter_context(stepping())
            return None

        def run() -> Any:
            result = closure()
            released.enter_context(stepping())
            return result

        return args[:1], {**kwargs, "closure": run}

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


class Correction(NamedTuple):
    """Setting of a correction: K = ``updates`` until rates are the user's own, and ``least``, the smallest tau."""

    updates: int
    least: int = 1


@dataclass(eq=False)
class RateCorrection(AroundStep):
    """A correction that multiplies learning rates by tau^(min(t / K, 1) - 1), during steps of ``optimizer`` only.

    Schedulers, loggers and checkpoints see the rates that the user has set. ``steps`` returns the largest number of
    optimizer steps that minibatches miss: tau is one more. ``update`` returns t, the number of updates so far.

    Raises:
        SettingError: if the optimizer takes no hooks.
    """

    optimizer: torch.optim.Optimizer
    setting: Correction
    steps: Callable[[], int]
    update: Callable[[], int]

    def __post_init__(self) -> None:
        check_hooks(self.optimizer, f"lr_correction={self.setting.updates}")

    @property
    def factor(self) -> float:
        """Factor of the rates in the next update."""
        left, steps = 1 - min(self.update() / self.setting.updates, 1.0), self.steps()
        return float(max(1 + steps, self.setting.least) ** -left) if steps else 1.0

    @property
    def is_secret(self) -> bool:
        return self.factor != 1.0

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Open a context around code that depends on the rates of the next step: its computation or a prediction."""
        factor, groups = self.factor, self.optimizer.param_groups
        before = [group["lr"] for group in groups]
        if factor != 1.0:
            for group in groups:
                group["lr"] = group["lr"] * factor
        try:
            yield
        finally:
            if factor != 1.0:
                for group, rate in zip(groups, before, strict=True):
                    group["lr"] = rate
