"""Random generators of each minibatch (law L7): a layer's random operations draw from generators of their own.

Every random operation of minibatch p inside a pipelined layer draws from a fresh ``torch.Generator``. Its seed comes
from the run seed, the virtual worker, p, and the ordinal of the pipelined module's call in p. It also comes from the
path of the innermost module that runs the operation, and the operation's ordinal in that module and call. So draws do
not depend on threads, timing, or the number and borders of stages. The default generators are neither read nor changed.

``attach`` replaces the ``forward`` of submodules that may draw, once. Inside ``RandomGenerators.minibatch`` the new
forward runs under a dispatch mode, which hands each random operation its generator. The mode belongs to the thread and
is below autograd: a backward pass finds the masks that its forward saved. The type of a module decides whether it may
draw, not one minibatch, so that draws that depend on data are not missed. These are torch.nn's dropouts, RReLU,
MultiheadAttention, multi-layer RNNs and FractionalMaxPool while they are active, and every class that is not torch.nn's
own.

Costs, measured on one core: 2 us for each minibatch and stage, 40 us for a Dropout (0.8 ms at 128 x 1024), 5 to 10 us
for each operator that a user's class runs itself, and nothing for torch.nn's other layers.

Not covered: Python's and numpy's random numbers, draws of a custom ``autograd.Function`` in *backward*, and forward
hooks of modules outside a wrapped module. An operation keeps a generator that the user gives it. A random operation
under ``torch.utils.checkpoint`` is refused: the checkpoint sets back default generators only. In spread runs torch's
default generators draw. CUDA's fused attention and RNN take no generator: they keep their dropout on the device's
default one, unless ``deterministic``. Code compiled by torch.compile runs uncompiled inside a user's class.
flex_attention insists on compilation, and cannot run there. torch's CPU generator uses 32 bits of a seed, CUDA's all:
two draws of one run may coincide, as in any hash.
"""

from __future__ import annotations

import hashlib
import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_hetpipe.pipeline.graph_layer import GraphLayer
from lightning_hetpipe.pipeline.random.graph_draws import GraphDraws, NoDropout, draw_in_graph
from lightning_hetpipe.pipeline.random.operators import RandomnessError, RandomOperators
from lightning_hetpipe.pipeline.user.user_section import ProcessState, has_own_seed


@dataclass(frozen=True)
class RandomGenerators:
    """Source of all random generators of one run. With ``deterministic``, it refuses operations that can draw from a
    default generator only (CUDA's fused attention and RNN with dropout). ``evaluation`` names an evaluation among those
    of the run, and is empty in training."""

    run_seed: int
    virtual_worker: int = 0
    deterministic: bool = False
    evaluation: str = ""

    def batch(self, minibatch: int | str) -> int | str:
        """Return the name of ``minibatch`` among all batches of the run."""
        return f"{self.evaluation} {minibatch}" if self.evaluation else minibatch

    def state(self, minibatch: int) -> ProcessState:
        """Return the process-wide state with which user code of ``minibatch`` begins."""
        return ProcessState.seeded(self.run_seed, self.virtual_worker, self.batch(minibatch))

    def generator(
        self, minibatch: int | str, path: str, ordinal: int, device: torch.device, call: int = 0
    ) -> torch.Generator:
        """Return a fresh generator on ``device`` for random operation ``ordinal`` (0, 1, ...) of module ``path``.
        ``call`` is the number of earlier calls of the pipelined module in the minibatch."""
        minibatch = self.batch(minibatch)
        if call:
            minibatch = f"{minibatch}.{call}"
        name = f"{self.run_seed}|{self.virtual_worker}|{minibatch}|{ordinal}|{path}"
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        # manual_seed takes a signed 64-bit number on some devices.
        return torch.Generator(device=device).manual_seed(int.from_bytes(digest, "big") & (2**63 - 1))

    @contextmanager
    def minibatch(self, minibatch: int, call: int = 0, *, in_user_code: bool = False) -> Iterator[None]:
        """Context manager in which this thread's runs of attached layers belong to ``minibatch``.

        They are call number ``call`` of a pipelined module. A stage enters the context for each forward, and ordinals
        start at 0. Outside, attached modules run as if unattached. A seed that user code sets governs draws
        ``in_user_code``.
        """
        outer, _thread.draws = _thread.draws, _Draws(self, minibatch, call, in_user_code)
        try:
            yield
        finally:
            _thread.draws = outer

    @contextmanager
    def watch(
        self, layers: Mapping[str, nn.Module], minibatch: int, call: int = 0
    ) -> Iterator[dict[str, Callable[..., Any]]]:
        """Open :meth:`minibatch` with ``layers`` :func:`attached`, in user code. Yield what to call for each layer. A
        call of the layer itself draws alike, unless layers share a module."""
        with attached(layers) as run, self.minibatch(minibatch, call, in_user_code=True):
            yield run


@contextmanager
def attached(
    layers: Mapping[str, nn.Module], without: Collection[nn.Module] = ()
) -> Iterator[dict[str, Callable[..., Any]]]:
    """Context manager in which ``layers`` are attached by path, without later traces. Yield what to call for each
    layer. Modules in ``without`` are left as they are."""
    installed: list[_Forward] = []
    try:
        yield {path: attach(layer, path, installed, without) for path, layer in layers.items()}
    finally:
        for forward in reversed(installed):
            forward.remove()


def attach(
    layer: nn.Module, path: str, installed: list[_Forward] | None = None, without: Collection[nn.Module] = ()
) -> Callable[..., Any]:
    """Make the random operations of ``layer`` draw from the running minibatch's generators. Called once per replica.

    The ``forward`` of its submodules is replaced. ``state_dict``, ``deepcopy`` and hooks stay as before.

    Args:
        path: The layer's name in the whole model, such as "net.3".
        installed: Collects the replacements.
        without: Modules that are left as they are.

    Returns:
        Callable to use instead of ``layer``, which names this position. So a module in several layers has the same
            names
        whether or not a split point separates the layers. It is ``layer`` itself if nothing may draw.
    """
    installed = [] if installed is None else installed
    modules = {name: module for name, module in layer.named_modules() if module not in without}
    drawing = [name for name, module in modules.items() if _may_draw_itself(module)]
    for name in drawing:
        forward = vars(modules[name]).get("forward")
        if not isinstance(forward, _Drawing):
            forward = _Drawing(modules[name])
            installed.append(forward)
        forward.names[path] = f"{path}.{name}" if name else path
    if any(not _is_torchs_own(modules[name]) for name in drawing):
        others = [module for name, module in modules.items() if name not in drawing]
        installed += [_Still(other) for other in others if not isinstance(vars(other).get("forward"), _Forward)]
    return _Positioned(layer, path) if drawing else layer


def may_draw(layer: nn.Module) -> bool:
    """Return True if ``layer`` or a module in it may draw random numbers."""
    return any(map(_may_draw_itself, layer.modules()))


def draws_now(layer: nn.Module) -> bool:
    """Return True if ``layer``, of a pipeline, draws in its present mode, as far as that can be known."""
    if isinstance(layer, GraphLayer):
        graphs = [part.graph for graph in layer.code.graphs for part in (graph.module, *graph.regions)]
        return any(node.target is drawn for graph in graphs for node in graph.nodes)
    modules = (module for module in layer.modules() if _may_draw_itself(module))
    return any(_ACTIVE[type(module)](module) if type(module) in _ACTIVE else True for module in modules)


def counters(layer: nn.Module) -> list[_Drawing]:
    """Return the counters of random operations in a graph of the attached ``layer``. Set them to 0 before it runs."""
    forwards = [vars(module).get("forward") for module in layer.modules()]
    return [forward for forward in forwards if isinstance(forward, _Drawing)]


def _may_draw_itself(module: nn.Module) -> bool:
    return not _is_torchs_own(module) or type(module) in _ACTIVE


def generator_of(path: str, ordinal: int, device: torch.device) -> torch.Generator:
    """Return the generator of random operation ``ordinal`` of module ``path``, for this thread's minibatch."""
    draws = _thread.draws
    if draws is None:
        raise RandomnessError(f"Module '{path}' draws random numbers outside of a minibatch.")
    return draws.generators.generator(draws.minibatch, path, ordinal, device, draws.call)


def drawn(path: str, ordinal: int, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``operator`` of a captured graph as random operation ``ordinal`` of module ``path``."""
    if torch.compiler.is_dynamo_compiling():
        return draw_in_graph(path, ordinal, operator, *args, **kwargs)
    if getattr(operator, "overloadpacket", None) is torch.ops.aten.randint_like:
        # torch.randint_like gives it no tensor that requires a gradient, for which the operator lacks a derivative.
        args = (args[0].detach(), *args[1:])
    draws = _thread.draws
    if draws is None:
        return operator(*args, **kwargs)
    outer, draws.path = draws.path, path
    draws.ordinals[path] = ordinal
    try:
        with draws:
            return operator(*args, **kwargs)
    finally:
        draws.path = outer


_ACTIVE: dict[type[nn.Module], Callable[[Any], bool]] = {
    **dict.fromkeys(
        (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
        lambda module: bool(module.training and module.p > 0),
    ),
    nn.RReLU: lambda module: bool(module.training),
    nn.MultiheadAttention: lambda module: bool(module.training and module.dropout > 0),
    **dict.fromkeys(
        (nn.RNN, nn.LSTM, nn.GRU), lambda module: bool(module.training and module.dropout > 0 and module.num_layers > 1)
    ),
    **dict.fromkeys((nn.FractionalMaxPool2d, nn.FractionalMaxPool3d), lambda module: True),
}
"""Classes of torch.nn whose own forward may draw, and the condition under which it does."""


def _is_torchs_own(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    if isinstance(forward, _Forward):
        forward = forward.replaced
    # A graph's random operators say themselves what they draw from, see `drawn`.
    return forward is None and (
        isinstance(module, GraphLayer) or type(module).__module__.startswith("torch.nn.modules.")
    )


class _Thread(threading.local):
    draws: _Draws | None = None
    position: str | None = None


_thread = _Thread()


class _Forward:
    """Replacement of the ``forward`` of one module."""

    # An object and not a closure: deepcopy copies what an object refers to, so that a copied module runs itself.

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward: Callable[..., Any] = module.forward
        self.replaced: Callable[..., Any] | None = vars(module).get("forward")
        self.__wrapped__ = self.forward  # for inspect.signature
        vars(module)["forward"] = self

    def remove(self) -> None:
        if self.replaced is None:
            del vars(self.module)["forward"]
        else:
            vars(self.module)["forward"] = self.replaced


class _Drawing(_Forward):
    """``forward`` of a module that may draw. It names the random operations that run directly in the module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.names: dict[str, str] = {}  # this module's path by the path of the layer that it is run in
        self.active = _ACTIVE.get(type(module))
        self.in_graph = 0  # random operations in the graph that is compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self._in_graph(*args, **kwargs)
        draws = _thread.draws
        if draws is None or (self.active is not None and not self.active(self.module)):
            return self.forward(*args, **kwargs)
        outer, draws.path = draws.path, self.name()
        try:
            if outer:  # inside another drawing module the mode is on already
                return self.forward(*args, **kwargs)
            with draws:
                return self.forward(*args, **kwargs)
        finally:
            draws.path = outer

    def _in_graph(self, *args: Any, **kwargs: Any) -> Any:
        if self.active is not None and not self.active(self.module):
            return self.forward(*args, **kwargs)
        with GraphDraws(self._draw_in_graph):
            return self.forward(*args, **kwargs)

    def _draw_in_graph(self) -> tuple[str, int]:
        if len(self.names) != 1:
            raise NoDropout("a module that draws random numbers stands in several layers")
        ordinal = self.in_graph
        self.in_graph = ordinal + 1
        return next(iter(self.names.values())), ordinal

    def name(self) -> str:
        if len(self.names) == 1:
            return next(iter(self.names.values()))
        if _thread.position in self.names:
            return self.names[_thread.position]
        raise RandomnessError(
            f"A module is shared by the layers {', '.join(self.names)} and was run outside of them, so that its random"
            " numbers have no name; give each layer a module of its own."
        )


class _Still(_Forward):
    """``forward`` of a module that draws nothing inside a module that may. It spares its operators the mode."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self.forward(*args, **kwargs)
        with drawing_nothing():
            return self.forward(*args, **kwargs)


@contextmanager
def drawing_nothing() -> Iterator[None]:
    """Context manager in which this thread runs nothing that draws, and operators are spared the mode."""
    draws = _thread.draws
    if draws is None or not draws.path or not draws.suspend():
        yield
        return
    outer, draws.path = draws.path, ""
    try:
        yield
    finally:
        draws.path = outer
        draws.__enter__()


class _Positioned:
    """A layer that runs at position ``path``."""

    def __init__(self, layer: nn.Module, path: str) -> None:
        self.layer = layer
        self.path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer, _thread.position = _thread.position, self.path
        try:
            return self.layer(*args, **kwargs)
        finally:
            _thread.position = outer


class _Draws(RandomOperators):
    """The draws of one call in one minibatch, in one thread."""

    def __init__(self, generators: RandomGenerators, minibatch: int, call: int, in_user_code: bool) -> None:
        super().__init__(fused=not generators.deterministic)
        self.in_user_code = in_user_code
        self.generators = generators
        self.minibatch = minibatch
        self.call = call
        self.path = ""  # path of the innermost running wrapped module, or empty
        self.ordinals: dict[str, int] = {}

    def generator(self, device: torch.device) -> torch.Generator:
        if _under_checkpoint():
            raise RandomnessError(
                f"Module '{self.path}' draws random numbers under torch.utils.checkpoint, whose second run would draw"
                " others; remove the checkpointing of this module, or its dropout, or set in_flight=1."
            )
        ordinal = self.ordinals.get(self.path, 0)
        self.ordinals[self.path] = ordinal + 1
        return self.generators.generator(self.minibatch, self.path, ordinal, device, self.call)

    def is_plain(self) -> bool:
        return self.in_user_code and has_own_seed()


def _under_checkpoint() -> bool:
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False
