"""Weights of modules that were made on meta, where ``Trainer.init_module(empty_init=True)`` leaves them.

Tensors get their memory on the host: in the loading of a checkpoint, and what none has filled before layers move to
devices. Then each module's ``reset_parameters`` runs, in the order of construction, so that weights depend on the
run's seed, and not on stages, devices or processes.

Only what Python code leaves uninitialised, as torch's modules do weights, lies on meta.
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.values import nested_tensors
from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.torch_private.modules import reset_of
from lightning_hetpipe.torch_private.subclasses import address_of
from lightning_hetpipe.torch_private.tensors import give_memory, version_counter

SHOWN = 3
"""Maximum number of parameter names listed in one error message."""


@contextmanager
def uninitialised_on_meta() -> Iterator[None]:
    """Open a context in which ``torch.empty`` makes tensors on meta, and loading into such a tensor gives it memory.

    All else is made as it is elsewhere: buffers that are computed, states of metrics, parameters with values from the
    start or from a checkpoint of somebody's. So values are lost in one case only, where code sets those of an
    uninitialised parameter, or computes others from them. ``reset_parameters`` sets them again, and a copy is made
    again; all else is :data:`LOST`.
    """
    with warnings.catch_warnings(), _UninitialisedOnMeta():
        warnings.filterwarnings(
            "ignore", ".*copying from a non-meta parameter in the checkpoint to a meta", UserWarning
        )
        yield


class Origin:
    """Origin of the values that a tensor on meta would have: a call of ``reset_parameters``; copies have the same.

    Args:
        module: Whose method that is; None for memory that is not initialised.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._kind, self._module = type(module), ref(self if module is None else module)

    def is_of(self, module: nn.Module) -> bool:
        """Tell whether ``module``, or one that is gone and of its kind, has given these values."""
        mine = self._module()
        return mine is module or (mine is None and type(module) is self._kind)


LOST = Origin()
"""Origin of values that nothing gives again."""


def origin_of(tensor: Tensor) -> Origin | None:
    """The origin of ``tensor``, which is on meta; None if it was made outside of :func:`uninitialised_on_meta`."""
    if is_lazy(tensor) or (found := _origins.get(tensor.untyped_storage())) is None:
        return None
    origin, layout = found
    return origin if layout == _layout(tensor) else LOST  # a part, or in another order


def leave_on_meta(tensor: Tensor, origin: Origin | None) -> None:
    """Put ``tensor`` on meta, as one that has ``origin``."""
    give_memory(tensor, "meta")
    if origin is not None:
        _note(tensor, origin)


_Layout = tuple[torch.Size, tuple[int, ...]]

_origins: WeakKeyDictionary[torch.UntypedStorage, tuple[Origin, _Layout]] = WeakKeyDictionary()
"""Origin of memory on meta, and the layout of who made it; views, and ``tensor.data``, share memory."""


def _layout(tensor: Tensor) -> _Layout:
    return tensor.shape, tensor.stride()


def _note(tensor: Tensor, origin: Origin) -> None:
    if not is_lazy(tensor):
        _origins[tensor.untyped_storage()] = origin, _layout(tensor)


_UNINITIALISED = {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}
_COPIES: set[Any] = {Tensor.clone, torch.clone, Tensor.__deepcopy__, Tensor.contiguous}
_COPIES |= {Tensor.to, Tensor.type, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16}
_SET_DATA: Any = Tensor.data
_SET_DATA = _SET_DATA.__set__


class _UninitialisedOnMeta(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None and kwargs.get("out") is None:
            kwargs["device"] = "meta"
        copies, sets = func is Tensor.copy_, func == _SET_DATA
        source = args[1] if (copies or sets) and len(args) > 1 and isinstance(args[1], Tensor) else None
        if source is not None and args[0].is_meta != source.is_meta:
            if args[0].is_meta:
                give_memory(args[0])  # as ``load_state_dict`` fills it
            elif sets:
                give_memory(args[0], "meta")  # torch sets data of one kind of memory only
        operands = nested_tensors([*args, *kwargs.values()])
        given = [tensor for tensor in operands if tensor.is_meta and not is_lazy(tensor)]
        before = [(tensor, version_counter(tensor)) for tensor in given]
        memory = [tensor.untyped_storage() for tensor in given]
        result = func(*args, **kwargs)
        for tensor, count in before:
            if version_counter(tensor) != count:
                _note_write(tensor, source if source is not None and source.shape == tensor.shape else None)
        for tensor in nested_tensors([result]):
            if tensor.is_meta and not any(tensor.untyped_storage() is each for each in memory):
                _note(tensor, _made(func, given))
        return result


def _note_write(tensor: Tensor, source: Tensor | None) -> None:
    """Note that somebody has written to ``tensor``, what is in ``source``, if given, and is as large."""
    before, layout = _origins.get(tensor.untyped_storage(), (None, _layout(tensor)))
    origin = LOST
    if before is not LOST and (module := _resetting()) is not None:
        origin = Origin(module)
    elif source is not None and layout == _layout(tensor):
        origin = origin_of(source) or LOST
    _origins[tensor.untyped_storage()] = origin, layout


def _made(func: Any, given: Sequence[Tensor]) -> Origin:
    """The origin of a new tensor on meta that ``func`` has made of those ``given``."""
    if func in _UNINITIALISED or _resetting() is not None:
        return Origin()
    return (origin_of(given[0]) if func in _COPIES and given else None) or LOST


def _resetting() -> nn.Module | None:
    """The module that resets parameters of its own now, as it does again where nothing else gives them values."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in ("reset_parameters", "_reset_parameters"):
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Transformer) or (
                isinstance(module, nn.Module) and any(True for _ in module.parameters(False))
            ):
                return module
        frame = frame.f_back
    return None


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
