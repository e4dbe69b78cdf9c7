"""Graphs of a group's members, compiled by ``torch.compile``: each by itself, in the thread of its member.

What makes other code is as for the layers of a stage (:mod:`~lightning_hetpipe.pipeline.compile.compilation`), and so
is what pauses meanwhile; members compile one after the other then. What is not divided runs as it is, and so does a
graph that cannot be compiled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from lightning_hetpipe.pipeline.autocast import Autocast
from lightning_hetpipe.pipeline.compile.compilation import KindsOfCalls, compiler_reason, under_own_code
from lightning_hetpipe.pipeline.random.graph_draws import NoDropout, refuse_other_draws
from lightning_hetpipe.torch_private.compiler import CompilerError, CompilerLimit, compiled

Graph = Callable[..., Any]


class CompiledMembers(KindsOfCalls):
    """The graphs of one segment.

    Args:
        layers: Names them, for people.
        options: What ``torch.compile`` is given.
    """

    def __init__(self, layers: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._layers, self._options = layers, options
        self._graphs: dict[tuple[fx.GraphModule, Autocast], Graph] = {}
        self._cannot: set[fx.GraphModule] = set()

    def of(self, graph: fx.GraphModule, autocast: Autocast) -> Graph:
        """Give what a member runs in place of ``graph``, in that state of autocast."""
        key = graph, autocast
        if key not in self._graphs:
            self._graphs[key] = self._compiled(graph)
        return self._graphs[key]

    def _compiled(self, graph: fx.GraphModule) -> Graph:
        run: Graph = compiled(under_own_code(_call, f"a part of {self._layers}"), self._options, refuse_other_draws)

        def call(*given: Any) -> Any:
            if graph in self._cannot:
                return graph(*given)
            try:
                return run(graph, given)
            except (CompilerError, CompilerLimit, NoDropout) as error:
                self._cannot.add(graph)
                warnings.warn(
                    f"torch.compile cannot compile a part of {self._layers}, which a device of its group runs"
                    f" uncompiled: {compiler_reason(error)}",
                    stacklevel=2,
                )
                return graph(*given)

        return call


def _call(graph: fx.GraphModule, given: tuple[Any, ...]) -> Any:
    return graph(*given)
