"""Weights of modules that were made on meta, by ``Trainer.init_module(empty_init=True)`` or ``torch.device("meta")``.

Tensors in a checkpoint get memory on the host when it is loaded, all other tensors before layers move to devices.
Values come from the recorded construction (:mod:`~lightning_hetpipe.strategy.recorded_init`). Without a recording, each
module's ``reset_parameters`` runs, in the order of construction. Weights depend on the run's seed, but not on stages,
devices or processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.strategy.recorded_init import is_recorded, replay
from lightning_hetpipe.torch_private.modules import reset_of
from lightning_hetpipe.torch_private.tensors import address_of, give_memory, version_counter

SHOWN = 3
"""Maximum number of parameter names listed in one error message."""


def load(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load ``state`` as torch does without meta: dtypes, ties and ``requires_grad`` stay the module's, memory is not
    shared with ``state``. Tensors that ``state`` lacks stay on meta."""
    made = _Made(module)
    loaded = module.load_state_dict(state, strict=strict)
    if empty := made.empty():
        missing = set(getattr(loaded, "missing_keys", state))  # if an override returns nothing: unchanged tensors
        given = {id(tensor) for name, tensor in _named(module) if name in state and name not in missing}
        made.give_back([tensor for tensor in empty if id(tensor) not in given])
    theirs = {address_of(t) for t in state.values() if _is_bare(t)} - {0, None}
    for tensor in _tensors(module):
        if _is_bare(tensor) and address_of(tensor) in theirs:
            tensor.data = tensor.data.clone()


def fill(module: nn.Module, seed: int) -> None:
    """Fill all tensors on meta in the LightningModule, or raise SettingError. The process's random state stays."""
    on_meta = list({id(tensor): tensor for _, tensor in _all_named(module) if tensor.is_meta}.values())
    if not on_meta and getattr(module, "device", None) != torch.device("meta"):
        return
    if any(map(is_recorded, on_meta)):  # but tensors made of them later, outside the recording, are refused
        _refuse(module, lambda tensor: tensor.is_meta and not (is_recorded(tensor) or is_lazy(tensor)))
        replay([tensor for tensor in on_meta if not is_lazy(tensor)], seed)
        for tensor in filter(is_lazy, on_meta):
            give_memory(tensor)
    else:
        _reset(module, seed)
    module.to("cpu")  # for the ``device`` attributes of the LightningModule and of metrics


def _reset(module: nn.Module, seed: int) -> None:
    made = _Made(module)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        parts: dict[nn.Module, None] = {}  # each once, in the order in which constructors end
        module.apply(parts.setdefault)
        for part in parts:
            made.reset(part)
    empty = {id(tensor) for tensor in made.empty()}
    try:
        _refuse(module, lambda tensor: tensor.is_meta or id(tensor) in empty)
    except SettingError:
        made.give_back(made.tensors)  # otherwise a second run would train on half-made weights
        raise


class _Made:
    """Tensors of ``module`` that were on meta and now have memory on the host. Bound: the module's weights once."""

    def __init__(self, module: nn.Module) -> None:
        on_meta = [tensor for tensor in _tensors(module) if tensor.is_meta]
        self._before = {id(tensor): give_memory(tensor) for tensor in on_meta}
        self.tensors = [tensor for tensor in on_meta if not is_lazy(tensor)]
        self._counts = {id(tensor): version_counter(tensor) for tensor in self.tensors}  # of tensors without values
        self._fillers: dict[int, nn.Module] = {}
        """Module that has reset each tensor, by the tensor's id."""

    def empty(self) -> list[Tensor]:
        """Return the tensors that nobody has written to."""
        return [tensor for tensor in self.tensors if self._is_empty(tensor)]

    def give_back(self, tensors: Sequence[Tensor]) -> None:
        """Put ``tensors`` on meta again."""
        for tensor in tensors:
            give_memory(tensor, memory=self._before[id(tensor)])

    def reset(self, part: nn.Module) -> None:
        """Reset ``part``'s empty tensors by its own method. Others stay, unless a module inside ``part`` reset them."""
        reset = reset_of(part)
        own = [tensor for tensor in _tensors(part, recurse=False) if self._is_empty(tensor)]
        if reset is None or not (own or isinstance(part, nn.Transformer)):
            return
        inside = set(part.modules())
        kept = [t for t in _tensors(part) if not self._is_empty(t) and self._fillers.get(id(t)) not in inside]
        if kept and not own:
            return
        before = [(tensor, tensor.clone()) for tensor in kept]
        for tensor in own:
            if _has_nan(tensor):
                tensor.fill_(torch.nan)
            self._counts[id(tensor)] = version_counter(tensor)
        reset()
        for tensor, values in before:
            tensor.copy_(values)
        for tensor in own:
            if not self._is_empty(tensor) or _is_written(tensor):
                del self._counts[id(tensor)]
                self._fillers[id(tensor)] = part

    def _is_empty(self, tensor: Tensor) -> bool:
        return self._counts.get(id(tensor)) == version_counter(tensor)


@contextmanager
def left_on_meta(module: nn.Module | None) -> Iterator[None]:
    """Context manager in which ``module.cpu`` does nothing if tensors are on meta, which torch refuses to move."""
    if module is None or not any(tensor.is_meta for tensor in _tensors(module)):
        yield
        return
    redirect = Redirect(module, "cpu", lambda redirect: module)
    try:
        yield
    finally:
        redirect.remove()


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_written(tensor: Tensor) -> bool:
    """Return whether a write that torch does not count (``tensor.data``) has replaced the NaN in ``tensor``."""
    return not tensor.numel() or (_has_nan(tensor) and not bool(tensor.flatten()[0].isnan()))


def _is_bare(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _named(module: nn.Module, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=recurse, remove_duplicate=False)
    yield from module.named_buffers(recurse=recurse, remove_duplicate=False)


def _tensors(module: nn.Module, recurse: bool = True) -> list[Tensor]:
    return [*module.parameters(recurse), *module.buffers(recurse)]


def _refuse(module: nn.Module, lacks: Callable[[Tensor], bool]) -> None:
    """Refuse a module if some of its tensors lack values, and name these tensors."""
    names = [name for name, tensor in _all_named(module) if lacks(tensor)]
    if names:
        shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        raise SettingError(
            f"{type(module).__name__} was made on meta, by init_module(empty_init=True) or torch.device('meta'), and"
            f" nothing gives values to {shown}; make all of it within init_module(empty_init=True), give such"
            " modules a method reset_parameters that sets them, or load a checkpoint that has them (ckpt_path=...)"
        )


def _all_named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers, and plain attributes on meta, with each of their paths."""
    for prefix, part in module.named_modules():
        for name, tensor in [*_named(part, recurse=False), *_attributes(part)]:
            yield ".".join(filter(None, (prefix, name))), tensor


def _attributes(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield plain attributes on meta, such as a metric's states. Results of a forward pass do not count."""
    for name, value in vars(part).items():
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        for tensor in values:
            if isinstance(tensor, Tensor) and tensor.is_meta and tensor.grad_fn is None:
                yield name, tensor
