"""The pieces of a LightningModule, their layers, and the fingerprint by which changes of the layers are noticed.

A *piece* is a module with trainable parameters that ``training_step`` calls from outside every other such module. The
*layers* of an ``nn.Sequential`` of torch.nn's own modules are its children (``grouping.py``). The layers of any other
module are parts of its graph, so stages run no user code. An ``nn.Sequential`` of the user's modules without a graph
has its children as layers.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from lightning_hetpipe.capture.captured import Captured
from lightning_hetpipe.capture.contents import Contents, attributes_with_contents, changed_attribute, plain_attributes
from lightning_hetpipe.capture.grouping import has_users_layers, is_plain_sequential, layers_of, shares_draws
from lightning_hetpipe.capture.reached_values import ReachedValues
from lightning_hetpipe.errors import PipelineRefusal, SettingError, nearest
from lightning_hetpipe.pipeline.dtypes import Autocast
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.pipeline.values import Value
from lightning_hetpipe.torch_private.modules import behind_compile, has_any_hooks, has_hooks

_TRAINING = attrgetter("training")


class SingleLayer(nn.Module):
    """Adapter of ``module``, a piece that is one layer of torch.nn, which takes its arguments as one value.

    It calls ``forward`` because the user's call of the piece already went through ``__call__``.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, value: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        args, kwargs = value
        return self.module.forward(*args, **kwargs)


def class_of(layer: nn.Module) -> str:
    """Return the name of a layer's class, for people."""
    return type(layer.module if isinstance(layer, SingleLayer) else layer).__name__


@dataclass(eq=False)
class Piece:
    """One pipelined module.

    Attributes:
        name: Path in the LightningModule.
        layers: Layers, in order.
        inputs: Detached inputs of each layer in each call of the watched step.
        autocast: State of autocast where ``training_step`` called the piece in the watched step.
        single: Its one layer, if it is a layer of torch.nn.
        captured: Its graphs, if it has any.
        wants_graph: Whether it gets a graph if possible, because a stage at a host runs nothing else.
    """

    name: str
    module: nn.Module
    layers: list[Layer] = field(default_factory=list)
    inputs: list[list[Value]] = field(default_factory=list)
    autocast: Autocast = field(default_factory=Autocast.current)
    single: SingleLayer | None = field(default=None, init=False)
    captured: Captured | None = None
    wants_graph: bool = False

    def __post_init__(self) -> None:
        self.single = SingleLayer(self.module) if is_single(self.module) else None

    def names_without_graph(self) -> list[str]:
        """Return the names of its layers if a Sequential of torch's own modules had no graph."""
        if self.wants_graph and is_plain_sequential(self.module) and not has_users_layers(self.module):
            return [name for name, _ in layers_of(self.name, self.module)]
        return [layer.name for layer in self.layers]

    def needs_graph(self) -> bool:
        """Return True if only a graph shows its layers."""
        return self.single is None and not is_plain_sequential(self.module)

    def may_have_graph(self) -> bool:
        """Return True if it gets a graph if possible, although its layers are known without one."""
        if self.single is not None or not is_plain_sequential(self.module) or shares_draws(self.module):
            return False
        return self.wants_graph or has_users_layers(self.module)

    def modules_of_layers(self) -> list[tuple[str, nn.Module]]:
        """Return its layers with their names, if these are known without a graph."""
        return [(self.name, self.single)] if self.single is not None else list(layers_of(self.name, self.module))

    def measured_inputs(self) -> list[list[tuple[Value, int]]]:
        """Return for each layer its inputs of different sizes, each with the number of calls with this size."""
        return [_alike(values) for values in zip(*self.inputs, strict=True)]

    def run(
        self, generators: RandomGenerators, batch: int, args: tuple[Any, ...], kwargs: dict[str, Any], call: int = 0
    ) -> Any:
        """Run the module itself in its call number ``call``, with the random draws of stages for ``batch`` (law L7).

        Draws are named as in stages, by the position of a layer in an ``nn.Sequential``. Its own hooks do not run.
        """
        if self.needs_graph():
            with generators.watch({self.name: self.module}, batch, call):
                return self.module.forward(*args, **kwargs)
        value, layers = self.plain_value(args, kwargs), self.modules_of_layers()
        with generators.watch(dict(layers), batch, call) as calls:
            for name, _ in layers:
                value = calls[name](value)
        return value

    def value(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the input of its first layer for a call of the module with these arguments."""
        if self.captured is not None:
            return self.captured.value(args, kwargs)
        return self.plain_value(args, kwargs)

    def plain_value(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the input of the first layer, if the layers are known without a graph."""
        if self.single is not None:
            return args, kwargs
        (value,) = (*args, *kwargs.values())  # as nn.Sequential takes one
        return value


def _alike(values: Iterable[Value]) -> list[tuple[Value, int]]:
    found: dict[Any, list[Value]] = {}
    for value in values:
        sizes = tuple((tensor.shape, tensor.dtype) for tensor in value.tensors)
        found.setdefault((sizes, value.requires_grad), []).append(value)
    return [(same[0], len(same)) for same in found.values()]


def named_pieces(root: nn.Module, setting: str | Sequence[str] | None) -> list[str] | None:
    """Check the names in the ``module`` setting and return them, or None if pieces are to be searched.

    Raises:
        SettingError: for a name that is no module of ``root``, or has no parameters.
    """
    if setting is None:
        return None
    names = [setting] if isinstance(setting, str) else list(setting)
    modules = {name: module for name, module in root.named_modules(remove_duplicate=False) if name}
    first_names = {id(module): name for name, module in root.named_modules()}
    for name in names:
        if name not in modules:
            raise SettingError(
                f"module={name!r} is not a module of {type(root).__name__}"
                f"{nearest(name, modules) or '; its modules are ' + ', '.join(n for n, _ in root.named_children())}"
            )
        if not any(True for _ in modules[name].parameters()):
            raise SettingError(f"module={name!r} has no parameters, so that nothing is gained; leave it out of module")
    return [first_names[id(behind_compile(modules[name]) or modules[name])] for name in names]


def never_called(names: Collection[str], name: str) -> SettingError:
    """Make the error that the ``module`` setting has a name that is never called."""
    return PipelineRefusal(
        f"module={list(names)!r} names '{name}', which training_step did not call, or only inside another pipelined"
        " module; leave it out of module, or call it in every training_step"
    )


def is_single(module: nn.Module) -> bool:
    """Return True if ``module`` is one layer of torch.nn, with nothing around it that only a graph would show."""
    if not type(module).__module__.startswith("torch.nn.modules.") or has_any_hooks(module):
        return False
    return not any(True for child in module.children() for _ in child.parameters())


class HasHooks(PipelineRefusal):
    """Refusal of a layer with a hook of the user's."""


def refuse_hooks(name: str, layer: nn.Module) -> None:
    """Refuse, by :class:`HasHooks`, hooks of the user's on layer ``name``, or on anything in it."""
    layer = layer.module if isinstance(layer, SingleLayer) else layer
    hooked = next((path for path, module in layer.named_modules() if has_hooks(module)), None)
    if hooked is not None:
        own = f"'{name}.{hooked}', a " if hooked else ""
        raise HasHooks(
            f"layer '{name}' has a hook (on {own}{class_of(layer.get_submodule(hooked))}), which a stage would run at"
            " the same time as other user code; remove it (a profiler's with"
            " PyTorchProfiler(record_module_names=False)), or put it on the pipelined module itself"
        )


class Fingerprint:
    """Modules, parameters, buffers, hooks and plain attributes of ``pieces`` at the last :meth:`take`.

    Copies of layers in stages must not fall behind them.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.take()

    def take(self) -> None:
        """Take the layers as they are now."""
        self._modules = [module for piece in self.pieces for module in piece.module.modules()]
        self._seen = self._now()
        self._contents = Contents(self._modules)
        self._beside = self._found_beside().now()
        self._parameters = [_parameter_ids(piece) for piece in self.pieces]

    def with_own_parameters(self, piece: int) -> bool:
        """Return True if piece number ``piece`` holds its own parameters now, without replacements."""
        return _parameter_ids(self.pieces[piece]) == self._parameters[piece]

    def changed(self) -> str | None:
        """Return the name of what has changed since :meth:`take`, or None."""
        if (difference := next(self._beside.differences(), None)) is not None:
            return difference.path
        if self._contents.same():
            return None
        if (name := changed_attribute(self._seen, self._now())) is None:
            self._contents.take()  # other objects, which are equal
        return name

    def _found_beside(self) -> ReachedValues:
        """Return tensors and objects (configurations) in plain attributes, which may be changed in place."""
        found = ReachedValues((), (), most=sys.maxsize)
        for path, _, module in self._parts():
            for attribute, value in plain_attributes(module).items():
                if isinstance(value, Tensor):
                    found.value(f"{path}.{attribute}", value)
                elif _is_plain_object(value):
                    found.attributes(f"{path}.{attribute}", value)
        found.follow()
        return found

    def modes(self) -> list[bool]:
        """Return the modes of all modules: True for training."""
        return [*map(_TRAINING, self._modules)]

    def other_mode(self, modes: list[bool]) -> str | None:
        """Return the name of a module whose mode differs from ``modes``, or None."""
        if self.modes() == modes:
            return None
        other = next(part for part, before in zip(self._modules, modes, strict=True) if part.training != before)
        return next(path for path, _, part in self._parts() if part is other)

    def follow(self) -> None:
        """Capture graphs anew, and refuse changes that new copies of the layers would not follow.

        Raises:
            SettingError: for layers that were replaced, and for hooks.
        """
        for piece in self.pieces:
            if piece.captured is not None:
                refuse_hooks(piece.name, piece.module)
                piece.captured.capture_again()
                continue
            now = piece.modules_of_layers()
            for name, module in now:
                refuse_hooks(name, module)
            if [module for _, module in now] != [layer.module for layer in piece.layers]:
                raise PipelineRefusal(
                    f"layers of '{piece.name}' were added, removed or replaced after the first minibatch, which has"
                    " shown the pipeline what there is; do it before fit, or in setup or configure_model"
                )

    def _parts(self) -> Iterator[tuple[str, Piece, nn.Module]]:
        """Yield the path of each module, its piece, and the module."""
        for piece in self.pieces:
            for path, module in piece.module.named_modules(prefix=piece.name, remove_duplicate=False):
                yield path, piece, module

    def _now(self) -> dict[str, Any]:
        """Return the present form of each module, and its plain attributes, by their paths."""
        found: dict[str, Any] = {}
        for path, piece, module in self._parts():
            parameters = [(key, id(value)) for key, value in module.named_parameters(recurse=False)]
            buffers = [key for key, _ in module.named_buffers(recurse=False)]  # exchanged ones are read anew
            graph: tuple[Any, ...] = ()
            if piece.captured is not None:  # which holds these tensors, and has been made for this mode
                graph = (module.training, *map(id, module.buffers(recurse=False)))
            hooks = module is not piece.module and has_hooks(module)
            found[path] = (id(module), *parameters, *buffers, hooks, *graph)
            found |= {f"{path}.{name}": value for name, value in attributes_with_contents(module).items()}
        return found


def _is_plain_object(value: Any) -> bool:
    """Return True if ``value`` is a user's object with settings: no module, function, class or library's object."""
    kind = type(value)
    if isinstance(value, nn.Module | type) or callable(value) or not hasattr(value, "__dict__"):
        return False
    return kind.__module__.partition(".")[0] not in ("torch", "builtins", "lightning", "lightning_hetpipe", "enum")


def _parameter_ids(piece: Piece) -> list[int]:
    return [id(parameter) for parameter in piece.module.parameters()]
