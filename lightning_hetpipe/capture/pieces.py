"""The pieces of a LightningModule, and their layers.

A *piece* is a module with trainable parameters that ``training_step`` calls from outside every other such module. The
*layers* of an ``nn.Sequential`` of torch.nn's own modules are its children (``grouping.py``). Of any other module
they are parts of its graph, so that stages run no code of the user's. An ``nn.Sequential`` of the user's modules of
which no graph can be made has its children as layers, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_hetpipe.capture.captured import Captured
from lightning_hetpipe.capture.grouping import has_users_layers, is_plain_sequential, layers_of, shares_draws
from lightning_hetpipe.errors import PipelineRefusal, SettingError, nearest
from lightning_hetpipe.pipeline.autocast import Autocast
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.pipeline.values import Value
from lightning_hetpipe.torch_private.modules import behind_compile, has_any_hooks, has_hooks


class SingleLayer(nn.Module):
    """Calls ``module``, a piece that is one of torch.nn's own layers, with the arguments that it is given as one value.

    Not through ``__call__``: the user's call of the piece has been through that.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, value: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        args, kwargs = value
        return self.module.forward(*args, **kwargs)


def class_of(layer: nn.Module) -> str:
    """Name of a layer's class, for people."""
    return type(layer.module if isinstance(layer, SingleLayer) else layer).__name__


@dataclass
class Piece:
    """One pipelined module.

    Attributes:
        name: Its path in the LightningModule.
        module: The live module.
        layers: Its layers, in order.
        inputs: What each layer was given in each call of the watched step, detached.
        autocast: What ``training_step`` had autocast do where it called the piece in the watched step.
        single: Its one layer, if it is one of torch.nn's own.
        captured: Its graphs, if it has any.
        wants_graph: Whether it is to have a graph if it can: a stage at a host runs nothing else.
    """

    name: str
    module: nn.Module
    layers: list[Layer] = field(default_factory=list)
    inputs: list[list[Value]] = field(default_factory=list)
    autocast: Autocast = field(default_factory=Autocast.current)
    single: SingleLayer | None = None
    captured: Captured | None = None
    wants_graph: bool = False

    @staticmethod
    def of(name: str, module: nn.Module, wants_graph: bool = False) -> Piece:
        """Make a piece of ``module``, which has no layers yet."""
        single = SingleLayer(module) if is_single(module) else None
        return Piece(name, module, single=single, wants_graph=wants_graph)

    def names_without_graph(self) -> list[str]:
        """Names of its layers where a Sequential of torch's own modules has no graph."""
        if self.wants_graph and is_plain_sequential(self.module) and not has_users_layers(self.module):
            return [name for name, _ in layers_of(self.name, self.module)]
        return [layer.name for layer in self.layers]

    def needs_graph(self) -> bool:
        """Tell whether its layers can be seen in a graph only."""
        return self.single is None and not is_plain_sequential(self.module)

    def may_have_graph(self) -> bool:
        """Tell whether it is to have a graph if it can, though its layers can be seen without one."""
        if self.single is not None or not is_plain_sequential(self.module) or shares_draws(self.module):
            return False
        return self.wants_graph or has_users_layers(self.module)

    def modules_of_layers(self) -> list[tuple[str, nn.Module]]:
        """Its layers by their names, as far as these can be seen without a graph."""
        return [(self.name, self.single)] if self.single is not None else list(layers_of(self.name, self.module))

    def measured_inputs(self) -> list[list[tuple[Value, int]]]:
        """For each layer its inputs of different sizes, each with the number of calls that have such a one."""
        return [_alike(values) for values in zip(*self.inputs, strict=True)]

    def run(
        self,
        generators: RandomGenerators,
        batch: int | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: int = 0,
    ) -> Any:
        """Run the module as it is; random operations draw as those of stages do for ``batch`` (law L7), in call number
        ``call`` of the module there.

        Draws are named as in stages: by the position of a layer in an ``nn.Sequential``. Hooks of the module itself do
        not run.
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
        """Input of its first layer, where ``training_step`` calls the module with these arguments."""
        if self.captured is not None:
            return self.captured.value(args, kwargs)
        return self.plain_value(args, kwargs)

    def plain_value(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Input of the first of the layers that can be seen without a graph."""
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
    """The names in the ``module`` setting, checked; None where pieces are to be found.

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
    """The ``module`` setting has a name that is never called."""
    return PipelineRefusal(
        f"module={list(names)!r} names '{name}', which training_step did not call, or only inside another pipelined"
        " module; leave it out of module, or call it in every training_step"
    )


def is_single(module: nn.Module) -> bool:
    """Tell whether ``module`` is one layer of torch.nn's own, with nothing around it that a graph had to show."""
    if not type(module).__module__.startswith("torch.nn.modules.") or has_any_hooks(module):
        return False
    return not any(True for child in module.children() for _ in child.parameters())


class HasHooks(PipelineRefusal):
    """Refusal of a layer that has a hook of the user's."""


def refuse_hooks(name: str, layer: nn.Module) -> None:
    """Refuse hooks of the user's on layer ``name``, or on anything in it.

    Raises:
        HasHooks: if there is a hook.
    """
    layer = layer.module if isinstance(layer, SingleLayer) else layer
    hooked = next((path for path, module in layer.named_modules() if has_hooks(module)), None)
    if hooked is not None:
        own = f"'{name}.{hooked}', a " if hooked else ""
        raise HasHooks(
            f"layer '{name}' has a hook (on {own}{class_of(layer.get_submodule(hooked))}), which a stage would run at"
            " the same time as other user code; remove it (a profiler's with"
            " PyTorchProfiler(record_module_names=False)), or put it on the pipelined module itself"
        )
