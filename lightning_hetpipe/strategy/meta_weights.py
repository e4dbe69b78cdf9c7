"""Weights of modules that were made on meta, where ``Trainer.init_module(empty_init=True)`` leaves them.

Tensors get their memory on the host: in the loading of a checkpoint, and what none has filled before layers move to
devices. Then each module's ``reset_parameters`` runs, in the order of construction, so that weights depend on the
run's seed, and not on stages, devices or processes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.strategy.empty_init import LOST, Origin, leave_on_meta, origin_of
from lightning_hetpipe.torch_private.modules import reset_of
from lightning_hetpipe.torch_private.subclasses import address_of
from lightning_hetpipe.torch_private.tensors import give_memory, version_counter

SHOWN = 3
"""Names in an error."""


def load(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load ``state``, as torch loads it into tensors that are not on meta: dtypes, ties and what needs a gradient stay
    the module's, and nothing lies in the memory of ``state`` afterwards. What it lacks stays on meta."""
    made = _Made(module)
    loaded = module.load_state_dict(state, strict=strict)
    if empty := made.empty():
        missing = set(getattr(loaded, "missing_keys", state))  # where an override tells nothing: what is unchanged
        names = _names(module)
        made.give_back([t for t in empty if all(name not in state or name in missing for name in names[id(t)])])
    theirs = {address_of(t) for t in state.values() if _is_bare(t)} - {0, None}
    for tensor in _tensors(module):
        if _is_bare(tensor) and address_of(tensor) in theirs:
            tensor.data = tensor.data.clone()


def fill(module: nn.Module, seed: int) -> None:
    """Fill what is on meta by ``reset_parameters``.

    Args:
        module: The LightningModule.
        seed: Of the random numbers; those of the process stay as they are.

    Raises:
        SettingError: if something would have no value, or another one than its constructor gives it.
    """
    made = _Made(module)
    if not made.tensors and getattr(module, "device", None) != torch.device("meta"):
        return
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        for part in _children_first(module):
            made.reset(part)
        made.copy()
    try:
        _refuse(module, {id(tensor) for tensor in made.empty()})
        _refuse_reset(module, made.losing & made.fillers.keys())
    except SettingError:
        made.give_back(made.tensors)  # else a second run would train on what has been made so far
        raise
    module.to("cpu")  # also what a LightningModule and metrics say of their device


class _Made:
    """The tensors of ``module`` that were on meta, and have memory on the host now.

    Bound: the module's weights once.
    """

    def __init__(self, module: nn.Module) -> None:
        on_meta = [tensor for tensor in _tensors(module) if tensor.is_meta]
        self._origins = {id(tensor): origin_of(tensor) for tensor in on_meta}
        if any(origin is not None for origin in self._origins.values()):  # then others are made of them, elsewhere
            self._origins.update({key: LOST for key, origin in self._origins.items() if origin is None})
        self.losing = {key for key, origin in self._origins.items() if origin is LOST}
        """Those that constructors have given other values than modules give them again."""
        for tensor in on_meta:
            give_memory(tensor)
        self.tensors = [tensor for tensor in on_meta if not is_lazy(tensor)]
        self._counts = {id(tensor): version_counter(tensor) for tensor in self.tensors}  # of what has no value yet
        self.fillers: dict[int, nn.Module] = {}
        """The module that has reset each, or would have."""
        self._originals: dict[Origin, Tensor] = {}
        """The tensor of each origin that the same module has reset again."""

    def empty(self) -> list[Tensor]:
        """The tensors that nobody has written to."""
        return [tensor for tensor in self.tensors if self._is_empty(tensor)]

    def give_back(self, tensors: Sequence[Tensor]) -> None:
        """Put ``tensors`` on meta again."""
        for tensor in tensors:
            leave_on_meta(tensor, self._origins[id(tensor)])

    def reset(self, part: nn.Module) -> None:
        """Let ``part`` reset what is empty in it, and nothing else but what modules inside of it have reset."""
        reset = reset_of(part)
        own = [tensor for tensor in _tensors(part, recurse=False) if self._is_empty(tensor)]
        if reset is None or not (own or isinstance(part, nn.Transformer)):
            return
        if own and all(self._original(tensor) is not None for tensor in own):  # copies, of what has its values
            self._filled(own, part)
            return
        inside = set(part.modules())
        kept = [t for t in _tensors(part) if not self._is_empty(t) and self.fillers.get(id(t)) not in inside]
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
        self._filled([tensor for tensor in own if not self._is_empty(tensor) or _is_written(tensor)], part)
        for tensor in _tensors(part):
            origin = self._origins.get(id(tensor))
            if origin is not None and self.fillers.get(id(tensor)) in inside and origin.is_of(part):
                self._originals.setdefault(origin, tensor)

    def copy(self) -> None:
        """Give copies the values of their originals, or of each other where these have others by now."""
        for tensor in self.tensors:
            origin = self._origins[id(tensor)]
            if origin is not None and origin is not LOST and id(tensor) in self.fillers:
                self._originals.setdefault(origin, tensor)
        for tensor in self.tensors:
            original = self._original(tensor)
            if original is not None and (self._is_empty(tensor) or id(tensor) in self.fillers):
                tensor.copy_(original)
                self._counts.pop(id(tensor), None)

    def _original(self, tensor: Tensor) -> Tensor | None:
        origin = self._origins[id(tensor)]
        return None if origin is None else self._originals.get(origin)

    def _filled(self, tensors: Sequence[Tensor], part: nn.Module) -> None:
        for tensor in tensors:
            del self._counts[id(tensor)]
            self.fillers[id(tensor)] = part

    def _is_empty(self, tensor: Tensor) -> bool:
        return self._counts.get(id(tensor)) == version_counter(tensor)


@contextmanager
def left_on_meta(module: nn.Module | None) -> Iterator[None]:
    """Open a context in which ``module.cpu`` leaves tensors on meta where they are; torch refuses to move them."""
    if module is None or not any(tensor.is_meta for tensor in _tensors(module)):
        yield
        return
    redirect = Redirect(module, "cpu", lambda redirect: module)
    try:
        yield
    finally:
        redirect.remove()


def _has_nan(tensor: Tensor) -> bool:
    """Tell whether NaN is a value of the dtype."""
    return tensor.is_floating_point() or tensor.is_complex()


def _is_written(tensor: Tensor) -> bool:
    """Tell whether somebody has written, uncounted (``tensor.data``), to ``tensor`` since it was filled by NaN."""
    return not tensor.numel() or (_has_nan(tensor) and not bool(tensor.flatten()[0].isnan()))


def _is_bare(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _named(module: nn.Module, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=recurse, remove_duplicate=False)
    yield from module.named_buffers(recurse=recurse, remove_duplicate=False)


def _tensors(module: nn.Module, recurse: bool = True) -> list[Tensor]:
    return [*module.parameters(recurse), *module.buffers(recurse)]


def _names(module: nn.Module) -> dict[int, list[str]]:
    """The names of each tensor of ``module``, of which it has several where weights are tied."""
    names = defaultdict(list)
    for name, tensor in _named(module):
        names[id(tensor)].append(name)
    return names


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """``module`` and those in it, each once, in the order in which constructors end."""
    seen: set[nn.Module] = set()

    def walk(part: nn.Module) -> Iterator[nn.Module]:
        for child in part.children():
            if child not in seen:
                yield from walk(child)
        seen.add(part)
        yield part

    return walk(module)


def _refuse_reset(module: nn.Module, reset: set[int]) -> None:
    """Refuse a module of whose tensors some were ``reset``, and would have other values if it were not for meta."""
    names = [name for name, tensor in _named(module) if id(tensor) in reset]
    if names:
        raise SettingError(
            f"{type(module).__name__} gives values to {_listed(names)} otherwise than by reset_parameters when it is"
            " made, which init_module(empty_init=True) leaves out; load a checkpoint that has them (ckpt_path=...), or"
            " make it without empty_init=True"
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _refuse(module: nn.Module, empty: set[int]) -> None:
    """Refuse a module of whose tensors some have no value, by their names."""
    names = [
        ".".join(filter(None, (prefix, name)))
        for prefix, part in module.named_modules()
        for name, tensor in [*_named(part, recurse=False), *_attributes(part)]
        if tensor.is_meta or id(tensor) in empty
    ]
    if names:
        raise SettingError(
            f"{type(module).__name__} was made on meta, by init_module(empty_init=True) or torch.device('meta'), and"
            f" nothing gives values to {_listed(names)}; make such a module elsewhere, give it a method"
            " reset_parameters that sets them, or load a checkpoint that has them (ckpt_path=...)"
        )


def _attributes(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Plain attributes on meta, and a metric's states, but not what a forward pass computes anew."""
    for name, value in vars(part).items():
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        for tensor in values:
            if isinstance(tensor, Tensor) and tensor.is_meta and tensor.grad_fn is None:
                yield name, tensor
