"""Tensors whose values are at a host: each operator on them runs there, in the order in which it is called here.

So weights, gradients and optimizer states of a stage lie where the stage is. Their users here need not know: an
optimizer, gradient clipping, a loss scaler, a callback that averages weights, a hook. Results of operators stay at the
host. Values come here only if they are asked for as numbers, printed, pickled or put into a tensor of this process.
Sizes alone decide where an operator runs, never values:

- An operator that writes runs where it writes. An operator on several lists of tensors (``_foreach_...``) runs in
  parts.
- An operator that draws random numbers, or whose sizes depend on values, runs here.
- Any other operator runs where most of its bytes are, or at a host with an accelerator if one of its tensors is there.

Tensors that lie elsewhere are copied for it. On CPUs results have the same bits wherever they are computed. This
process sees a tensor at a host as on the CPU, whatever its device there.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from lightning_hetpipe.hosts.host_memory import CPU, Handle, HostMemory
from lightning_hetpipe.pipeline.plain_code import NotPlain
from lightning_hetpipe.pipeline.values import nested_tensors
from lightning_hetpipe.torch_private.graphs import OperatorOverload, schema_of
from lightning_hetpipe.torch_private.tensors import as_plain, exchange, make_without_memory


class RemoteTensor(Tensor):
    """A tensor at a host. ``like`` is a tensor of its sizes, strides and dtype."""

    handle: Handle

    @staticmethod
    def __new__(cls, handle: Handle, like: Tensor) -> RemoteTensor:
        made = make_without_memory(cls, like, CPU)
        made.handle = handle
        handle.memory.tensors[id(made)] = made
        return made

    def __init__(self, handle: Handle, like: Tensor) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = _FUNCTIONS.get(func)
        with as_plain():
            return (own or func)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares an instance method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def _data(tensor: RemoteTensor) -> Tensor:
    return RemoteTensor(tensor.handle, tensor)


def _set_data(tensor: Tensor, value: Tensor) -> None:
    if not isinstance(tensor, RemoteTensor):
        tensor.data = local(value)
        return
    if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        raise RuntimeError(
            f"a tensor of a stage at a host has shape {list(tensor.shape)} and {tensor.dtype}, and cannot be given data"
            f" of shape {list(value.shape)} and {value.dtype}"
        )
    if isinstance(value, RemoteTensor) and value.handle.memory is tensor.handle.memory:
        tensor.handle = value.handle
    else:
        tensor.handle = tensor.handle.memory.put(local(value).detach())


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    if id(tensor) in memo:
        found: Tensor = memo[id(tensor)]
        return found
    copied = tensor.detach().clone()
    is_parameter = isinstance(tensor, nn.Parameter)
    made = nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
    memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None and not is_parameter:  # torch copies a parameter without its gradient
        own = isinstance(tensor.grad, RemoteTensor)  # within this function, torch would not ask for another one
        made.grad = _copied(tensor.grad, memo) if own else copy.deepcopy(tensor.grad, memo)
    return made


def _here(name: str) -> Callable[..., Any]:
    """Make the function that calls method ``name`` of a tensor's value."""

    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(local(tensor), name)(*args, **kwargs)

    return call


_VALUES = ("numpy", "tolist", "__array__", "__format__", "__reduce_ex__")
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.data.__get__: _data,  # type: ignore[attr-defined]  # torch declares an attribute
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.__deepcopy__: _copied,
    Tensor.__repr__: lambda tensor, tensor_contents=None: repr(local(tensor)),
    **{getattr(Tensor, name): _here(name) for name in _VALUES},
}
"""Replacements of functions that are no operators."""


def remote(value: Tensor, memory: HostMemory) -> RemoteTensor:
    """Move ``value`` to the host of ``memory``. Raise NotPlain if the tensor cannot be sent."""
    return RemoteTensor(memory.put(value.detach()), value)


def local(tensor: Tensor) -> Tensor:
    """Return the value of ``tensor`` in this process. A tensor at a host is copied, a parameter as a parameter."""
    if not isinstance(tensor, RemoteTensor):
        return tensor
    found = tensor.handle.bring()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(found, tensor.requires_grad)
    return found.detach().requires_grad_(tensor.requires_grad)


def move_out(parameter: nn.Parameter, memory: HostMemory) -> None:
    """Move ``parameter`` and its gradient to the host of ``memory``, for all references to them."""
    moved, gradient = nn.Parameter(remote(parameter, memory), parameter.requires_grad), parameter.grad
    exchange(parameter, moved)
    memory.tensors[id(parameter)] = parameter
    is_dense = gradient is not None and gradient.layout is torch.strided
    parameter.grad = remote(gradient, memory) if gradient is not None and is_dense else gradient


def come_home(tensor: Tensor) -> None:
    """Make a leaf, whose host has ended, and its gradient tensors of this process, for all references to them."""
    value, gradient = local(tensor).detach(), tensor.grad
    is_parameter, wanted = isinstance(tensor, nn.Parameter), tensor.requires_grad
    exchange(tensor, nn.Parameter(value, wanted) if is_parameter else value.requires_grad_(wanted))
    if isinstance(gradient, RemoteTensor):
        come_home(gradient)
    tensor.grad = gradient


@dataclass(frozen=True)
class _Operator:
    """Facts of an operator.

    Attributes:
        writes: Places and names of arguments that it changes.
        gives: Place and name of the argument that each result is, or None for a new tensor. None if it returns no
            tensors.
        is_local: Whether it runs in this process.
        on_lists: Whether each list among its arguments has one value for each tensor.
    """

    writes: Sequence[tuple[int, str]]
    gives: Sequence[tuple[int, str] | None] | None
    is_local: bool
    on_lists: bool


@functools.cache
def _facts(func: OperatorOverload) -> _Operator:
    schema = schema_of(func)
    writes: list[tuple[int, str]] = []
    aliases: dict[str, tuple[int, str]] = {}
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.append((place, argument.name))
            aliases.update(dict.fromkeys(argument.alias_info.before_set, (place, argument.name)))
    gives: list[tuple[int, str] | None] = []
    for result in schema.returns:
        names = () if result.alias_info is None else result.alias_info.before_set
        gives.append(next((aliases[name] for name in names if name in aliases), None))
    gives_tensors = all(str(result.type) in ("Tensor", "List[Tensor]") for result in schema.returns)
    is_local = torch.Tag.nondeterministic_seeded in func.tags or torch.Tag.dynamic_output_shape in func.tags
    on_lists = schema.name.startswith(("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_"))
    return _Operator(writes, gives if gives_tensors else None, is_local, on_lists)


_SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
"""Operators that return their argument."""

_NO_SIZES: Any = object()
_SIZES: dict[Any, Any] = {}
_MOST_SIZES = 10_000


def _run(func: OperatorOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if func in _SAME:
        return RemoteTensor(args[0].handle, args[0])
    if func is torch.ops.aten.record_stream.default:
        return None  # it has no memory that might be used anew
    facts, tensors = _facts(func), [*nested_tensors((args, kwargs))]
    owners = {each.handle.owner if isinstance(each, RemoteTensor) else None for each in tensors}
    if facts.on_lists and facts.writes:  # torch counts changes of single tensors only
        increment_version(_written(facts, args, kwargs))
    device = kwargs.get("device")
    if facts.is_local or owners == {None} or device not in (None, CPU):
        return _locally(func, facts, args, kwargs)
    if len(owners) == 1:
        return _remotely(func, facts, owners.pop(), args, kwargs)
    if facts.on_lists and len(places := _places(args)) > 1:
        return _in_parts(func, facts, args, kwargs, places)
    prefers_hosts = bool(facts.writes) or any(each is not None and each.accelerates for each in owners)
    owner = _most(_written(facts, args, kwargs) or tensors, prefers_hosts=prefers_hosts)
    if owner is None:
        return _locally(func, facts, args, kwargs)
    return _remotely(func, facts, owner, args, kwargs)


def _owner(tensor: Tensor) -> HostMemory | None:
    return tensor.handle.owner if isinstance(tensor, RemoteTensor) else None


def _argument(where: tuple[int, str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    place, name = where
    return args[place] if place < len(args) else kwargs.get(name)


def _written(facts: _Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    return [*nested_tensors([_argument(each, args, kwargs) for each in facts.writes])]


def _most(tensors: Sequence[Tensor], *, prefers_hosts: bool) -> HostMemory | None:
    """Return the memory with most bytes of ``tensors``, or None for this process's."""
    sizes: dict[HostMemory | None, int] = {}
    for tensor in tensors:
        owner = _owner(tensor)
        sizes[owner] = sizes.get(owner, 0) + tensor.numel() * tensor.element_size()
    if prefers_hosts and len(sizes) > 1:
        sizes.pop(None, None)  # what is written here comes back
    return max(sizes, key=lambda owner: (sizes[owner], owner is None))


def _places(args: Sequence[Any]) -> dict[HostMemory | None, list[int]]:
    """Return the numbers of the tensors in the first list among ``args``, by place."""
    first = next((each for each in args if isinstance(each, list | tuple) and each), ())
    found: dict[HostMemory | None, list[int]] = {}
    for number, tensor in enumerate(first):
        found.setdefault(_owner(tensor), []).append(number)
    return found


def _in_parts(
    func: OperatorOverload,
    facts: _Operator,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    places: Mapping[HostMemory | None, Sequence[int]],
) -> Any:
    """Run ``func`` separately on the tensors of each place."""
    count = sum(map(len, places.values()))
    found: list[Any] = [None] * count
    gives: Any = None

    def part(value: Any, numbers: Sequence[int]) -> Any:
        is_list = isinstance(value, list | tuple) and len(value) == count
        return [value[number] for number in numbers] if is_list else value

    for owner, numbers in places.items():
        own, named = [part(each, numbers) for each in args], {name: part(v, numbers) for name, v in kwargs.items()}
        gives = _locally(func, facts, own, named) if owner is None else _remotely(func, facts, owner, own, named)
        for number, each in zip(numbers, gives or (), strict=False):
            found[number] = each
    return None if gives is None else found


def _locally(func: OperatorOverload, facts: _Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``func`` here, on values brought here, and send back what it has changed."""
    brought: dict[int, tuple[RemoteTensor, Tensor]] = {}

    def here(leaf: Tensor) -> Tensor:
        if not isinstance(leaf, RemoteTensor):
            return leaf
        if id(leaf) not in brought:
            brought[id(leaf)] = leaf, leaf.handle.bring()
        return brought[id(leaf)][1]

    results = func(*_mapped(here, args), **{name: _mapped(here, each) for name, each in kwargs.items()})
    for tensor in _written(facts, args, kwargs):
        if _owner(tensor) is not None:
            tensor.copy_(brought[id(tensor)][1])
    back = {id(value): tensor for tensor, value in brought.values()} if facts.writes else {}
    return _mapped(lambda leaf: back.get(id(leaf), leaf), results) if back else results


def _remotely(
    func: OperatorOverload, facts: _Operator, memory: HostMemory | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    assert memory is not None
    waits, written, lent = True, _written(facts, args, kwargs), dict[int, Handle]()

    def there(leaf: Tensor) -> Any:
        nonlocal waits
        if isinstance(leaf, RemoteTensor) and leaf.handle.owner is memory:
            return leaf.handle.name
        waits = False
        value = (leaf.handle.bring() if isinstance(leaf, RemoteTensor) else leaf).detach()
        if value.layout is not torch.strided:
            raise NotPlain("a sparse tensor has no place in a message")
        if not any(leaf is each for each in written):
            return value
        if id(leaf) not in lent:
            lent[id(leaf)] = memory.put(value)
        return lent[id(leaf)].name

    try:
        sent = _mapped(there, args, _plain)
        named = {name: _mapped(there, each, _plain) for name, each in kwargs.items()}
        if facts.gives is None:
            return memory.value(func, sent, named)
        new = _sizes(func, args, kwargs) if None in facts.gives else None
        if new is _NO_SIZES:
            return _locally(func, facts, args, kwargs)
        made: list[RemoteTensor] = []

        def result(like: Tensor) -> RemoteTensor:
            made.append(RemoteTensor(memory.new(), like))
            return made[-1]

        parts = new if len(facts.gives) > 1 and new is not None else [new] * len(facts.gives)
        found = [
            _mapped(result, part) if where is None else _argument(where, args, kwargs)
            for where, part in zip(facts.gives, parts, strict=True)
        ]
        memory.run(func, sent, named, [each.handle.number for each in made], waits=waits)
    except NotPlain:
        return _locally(func, facts, args, kwargs)
    for tensor in written:
        if id(tensor) in lent:
            tensor.copy_(lent[id(tensor)].bring())
    return (tuple(found) if len(found) > 1 else found[0]) if found else None


def _sizes(func: OperatorOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return tensors without values that look like the results of ``func``, or ``_NO_SIZES`` if unknown."""
    key: Any = func, _looks(args), _looks([*kwargs.items()])
    try:
        found = _SIZES.get(key)
    except TypeError:  # an argument cannot be hashed
        found = key = None
    if found is None:
        try:
            named = {name: _mapped(_meta, each) for name, each in kwargs.items() if name != "device"}
            found = func(*_mapped(_meta, args), **named, **({"device": "meta"} if "device" in kwargs else {}))
        except (NotImplementedError, RuntimeError):
            found = _NO_SIZES
        if key is not None and len(_SIZES) < _MOST_SIZES:
            _SIZES[key] = found
    return found


def _looks(values: Sequence[Any]) -> Any:
    """Return the key of arguments: tensors without their values."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, list | tuple):
            found.append(_looks(value))
        else:
            found.append((type(value), value))
    return tuple(found)


def _mapped(change: Callable[[Any], Any], value: Any, other: Callable[[Any], Any] = lambda other: other) -> Any:
    """Apply ``change`` to each tensor in ``value``, and ``other`` to everything else."""
    if isinstance(value, Tensor):
        return change(value)
    return [_mapped(change, each, other) for each in value] if isinstance(value, list | tuple) else other(value)


_SENT = (int, float, str, torch.dtype, torch.layout, torch.memory_format, torch.device)


def _plain(value: Any) -> Any:
    """Return ``value``, which is no tensor, or raise NotPlain if it cannot be sent."""
    if value is None or isinstance(value, _SENT):
        return value
    raise NotPlain(f"a {type(value).__name__} has no place in a message")


def _meta(leaf: Tensor) -> Tensor:
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
