"""Side effects of a module's forward, and Python values outside the module that its forward reads.

A graph has no side effects, and has frozen the values that were read. Names in the functions that the module calls show
which values they may read: globals, closures, defaults, class attributes, and attributes of other objects. If such a
value has changed, the graph is compared with the module (``parity_check.py``). A change of the module's own attributes
is followed, or refused by name (``pieces.py``).

A module runs again to be traced, and to be compared with its graph. Changes beside its weights are then put back: of
its attributes and buffers, of their contents, and of the frozen values. A change that it makes in each run is a side
effect.
"""

from __future__ import annotations

import gc
import inspect
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from lightning_hetpipe.capture.contents import (
    CONTAINERS,
    PLAIN,
    AttributesBefore,
    items_of,
    plain_attributes,
    refill,
    same_objects,
)
from lightning_hetpipe.capture.noticed_calls import NoticedCalls, is_users, line_that_names
from lightning_hetpipe.capture.reached_values import Moment, ReachedValues, is_followed, names_in, told
from lightning_hetpipe.capture.variant import SeenAnswers
from lightning_hetpipe.errors import PipelineRefusal
from lightning_hetpipe.pipeline.values import equal
from lightning_hetpipe.torch_private.tensors import address_of, pytree, unseen_change


class FrozenValues:
    """The values outside ``module``, a live captured module, that its graphs have frozen."""

    def __init__(self, module: nn.Module) -> None:
        self.answers = SeenAnswers()
        """Answers to its decisions by values of data, when it was last watched."""
        self.checkpoints = False
        """True after it was seen to call ``torch.utils.checkpoint``."""
        self.noticed = NoticedCalls()
        """Calls that the module was seen to make and a graph would leave out."""
        self.tolerated: set[str] = set()
        """Paths of values that the module may change while it is traced, as it did not change them in a real run."""
        self._own: list[str] = []
        self._module = module
        self._called: dict[tuple[CodeType, int], dict[str, Any]] = {}
        self._reached = ReachedValues((), ())
        self._replaced = False  # a value that may hold others
        self._stale = False  # what to watch is to be found anew

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context manager that profiles the module's forward, and records its functions and noticed calls.

        If another profiler runs in this thread, record nothing, and warn. Contexts may be nested.
        """
        outer, self.noticed = sys.getprofile(), NoticedCalls()  # an evaluation and a minibatch note their own calls
        if outer is not None and not isinstance(outer, NoticedCalls):
            warnings.warn(
                f"another profiler of Python ({type(outer).__name__}) runs, so that side effects of"
                f" {type(self._module).__name__}.forward and changes of what it reads outside the module may go"
                " unnoticed; train without that profiler, or set in_flight=1",
                stacklevel=2,
            )
            yield
            return
        noticed, collects = self.noticed, gc.isenabled()
        gc.disable()  # what it calls is no part of forward: finalisers, and gc.callbacks that keep times
        sys.setprofile(noticed)
        try:
            yield
        finally:
            sys.setprofile(outer)
            if collects:
                gc.enable()
            if outer is not None:
                outer.update(noticed)
                outer.functions.update(noticed.functions)
            called = {(code, id(names)): names for code, names in noticed.functions.values()}
            noticed.functions = {}
            self.checkpoints |= any(code.co_filename == checkpoint.__file__ for code, _ in called)
            new = {
                key: names
                for key, names in called.items()
                if key not in self._called and is_users(key[0]) and not _is_generated(key[0], names)
            }
            self._stale |= bool(new) or self._replaced
            self._called |= new

    @property
    def reached(self) -> ReachedValues:
        """Values that may be read by functions that the module was seen to call."""
        if self._stale:
            self._find()
        return self._reached

    def changed(self, before: Moment) -> str | None:
        """Name some values that have changed since ``before`` or were not watched then, or return None."""
        if before.values is not self.reached:
            return "what it reads"
        found = [*before.differences()]
        self._replaced |= not all(isinstance(value, PLAIN) for each in found for value in (each.before, each.now))
        return told(found)

    def is_own(self, path: str) -> bool:
        """Return True if ``path`` is an attribute of the module or of its parts, or lies in such an attribute."""
        return any(path == own or path.startswith((f"{own}.", f"{own}[")) for own in self._own)

    def line_of(self, path: str) -> str | None:
        """Return for people the first line of the called functions that names the last part of ``path``."""
        return line_that_names([code for code, _ in self._called], path)

    def _find(self) -> None:
        parts = dict(self._module.named_modules())
        names = names_in(code for code, _ in self._called)
        self._reached = reached = ReachedValues(names, parts.values())
        self._own, self._replaced, self._stale = [], False, False
        for globals_ in {id(held): held for held in self._called.values()}.values():
            read = {name for (code, _), held in self._called.items() if held is globals_ for name in code.co_names}
            reached.namespace(globals_.get("__name__", "a module"), globals_, read)
        for function in _functions(self._called):
            reached.function(function)
        for path, part in parts.items():
            reached.kind(type(part))
            reached.slots(path or type(part).__name__, part)
            attributes = plain_attributes(part)  # Fingerprint sees to these themselves
            for name in sorted(names & attributes.keys()):
                self._own.append(f"{path or type(part).__name__}.{name}")
                reached.value(self._own[-1], attributes[name])
        reached.follow()


def _is_generated(code: CodeType, globals_: Mapping[str, Any]) -> bool:
    """Return True if a library has written ``code`` for a class of its own, as ``dataclasses`` does."""
    return code.co_filename == "<string>" and not is_followed(str(globals_.get("__name__")))


def _functions(called: Mapping[tuple[CodeType, int], Mapping[str, Any]]) -> Iterator[FunctionType]:
    """Yield the functions with the code of ``called``, which also has their globals."""
    unknown: dict[int, CodeType] = {}
    for (code, _), globals_ in called.items():
        first, *rest = code.co_qualname.split(".")
        found: Any = globals_.get(first)
        for part in rest:
            found = getattr(found, "__dict__", {}).get(part)
        if isinstance(found, FunctionType) and found.__code__ is code:
            yield found
        else:  # such as a closure, of which there may be several: all objects are looked through
            unknown[id(code)] = code
    for function in gc.get_referrers(*unknown.values()) if unknown else ():
        if isinstance(function, FunctionType) and id(function.__code__) in unknown:
            yield function


class SideEffect(PipelineRefusal):
    """Refusal of a graph for a module that does something besides returning a value.

    Attributes:
        paths: What it changes below its attributes, or outside of itself, while it is traced.
        is_shared: Whether it changes something outside its own attributes: a global, a closure, a class.
        is_lost: True if the module cannot be taken apart either. User code runs in another thread, which has other
            context variables. Or a comparison cannot put the change back, as for an iterator.
    """

    def __init__(
        self,
        name: str,
        what: str,
        line: str | None = None,
        paths: Sequence[str] = (),
        *,
        is_shared: bool = False,
        is_lost: bool = False,
    ) -> None:
        where = f" ({line})" if line else ""
        super().__init__(
            f"'{name}' {what} in forward{where}, which its graph would not; do it in training_step, or return it with"
            " the output"
        )
        self.paths = paths
        self.is_shared = is_shared
        self.is_lost = is_lost


class StateBefore:
    """The state of ``module``, and of what its functions reach (``frozen``), before an additional run.

    If it ``runs`` on values and not only on shapes, buffers may change. Then ``buffers`` has copies of them by path.
    """

    def __init__(self, module: nn.Module, frozen: FrozenValues, runs: bool) -> None:
        parts = [*module.modules()]
        self.attributes = AttributesBefore(module)
        self.buffers = {path: buffer.clone() for path, buffer in module.named_buffers()} if runs else {}
        self._frozen = frozen
        self._before = frozen.reached.now(copied=True)
        self._memory = [(buffer, buffer.data) for buffer in module.buffers()]
        self._names = _with_items(vars(part)["_buffers"] for part in parts)
        owned = (value for part in parts for value in plain_attributes(part).values() if isinstance(value, CONTAINERS))
        self._containers = _with_items([*map(vars, parts), *owned])

    def changed(self) -> list[str]:
        """Return the paths of changes outside the module's own attributes, and inside them below their first level.
        Tolerated changes are left out."""
        paths = dict.fromkeys(each.path for each in self._before.differences())
        return [path for path in paths if path not in self._frozen.tolerated]

    def undo_buffers(self) -> None:
        """Give the modules the buffers that they held, with their memory and values.

        A forward may have replaced them by views of its inputs, or of data.
        """
        _refill(self._names)
        for buffer, data in self._memory:
            if address_of(buffer) != address_of(data):
                buffer.data = data
        put_back(zip((buffer for buffer, _ in self._memory), self.buffers.values(), strict=False))

    def undo(self) -> None:
        """Put everything back."""
        self.undo_buffers()
        _refill(self._containers)
        self._before.put_back()


def _with_items(containers: Iterable[Any]) -> list[tuple[Any, tuple[Any, ...]]]:
    return [(container, items_of(container)) for container in containers]


def _refill(containers: Iterable[tuple[Any, tuple[Any, ...]]]) -> None:
    for container, items in containers:
        if not same_objects(items_of(container), items):
            refill(container, items)


@contextmanager
def untouched(module: nn.Module, frozen: FrozenValues, *, runs: bool = False) -> Iterator[StateBefore]:
    """Context manager that puts back all changes of ``module`` and of what it reaches, except weights."""
    before_run = StateBefore(module, frozen, runs)
    with ExitStack() as stack:
        reached = frozen.reached
        for each in (*reached.plain.values(), *reached.parameters, *(module.buffers() if runs else ())):
            if isinstance(each, Tensor) and not each.is_inference():
                stack.enter_context(unseen_change(each))  # a backward that is still to come may have saved it
        stack.callback(before_run.undo)
        yield before_run


def put_back(buffers: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give buffers the values that they had earlier."""
    with torch.no_grad():
        for buffer, earlier in buffers:
            if not equal(buffer, earlier):  # to write what it has would count as a change of it
                buffer.copy_(earlier)


@contextmanager
def refusing_changes(
    name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    """Context manager around a call of ``forward`` of the module ``name``, which refuses a container in the arguments
    that has other items after the call, by a :class:`SideEffect` that names the argument."""
    try:
        bound = inspect.signature(forward).bind(*args, **kwargs).arguments
    except TypeError:  # the call itself will say so
        bound = {}
    containers = [(path, value, _items(value)) for path, value in _containers(bound, "")]
    yield
    for path, value, earlier in containers:
        if not same_objects(_items(value), earlier):
            raise SideEffect(name, f"changes its argument '{path}' (a {type(value).__name__})")


def refuse_noticed(name: str, frozen: FrozenValues, *kinds: str) -> None:
    """Refuse, by a :class:`SideEffect`, a graph for the module ``name`` if its forward made calls of ``kinds``."""
    if (told := frozen.noticed.told(*kinds)) is not None:
        raise SideEffect(name, *told)


def refuse_seeded(name: str) -> None:
    """Refuse to pipeline the module ``name`` because a seed of the user determines its numbers."""
    raise PipelineRefusal(
        f"'{name}' draws random numbers after training_step has set a seed, and in stages each minibatch draws from"
        " generators of its own; set no seed there, or name the other modules to pipeline (module=[...])"
    )


def _containers(value: Any, path: str, depth: int = 4) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor | str | bytes) or depth == 0:
        return
    if path and not isinstance(value, tuple) and (isinstance(value, CONTAINERS) or hasattr(value, "__dict__")):
        yield path, value
    if isinstance(value, dict):
        inner = [(f"{path}[{key!r}]" if path else str(key), each) for key, each in value.items()]
    elif isinstance(value, list | tuple | deque):
        inner = [(f"{path}[{index}]", each) for index, each in enumerate(value)]
    elif type(value) in pytree.SUPPORTED_NODES:
        inner = [(f"{path}.{key}", each) for key, each in getattr(value, "__dict__", {}).items()]
    else:
        return
    for name, each in inner:
        yield from _containers(each, name, depth - 1)


def _items(value: Any) -> tuple[Any, ...]:
    return items_of(value if isinstance(value, CONTAINERS) else vars(value))
