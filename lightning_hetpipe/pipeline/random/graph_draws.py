"""Random operations in compiled code (law L7): the graph asks for its masks, and stays one graph.

Code from ``torch.compile`` runs no Python, so no dispatch mode can hand a random operator its generator. So while a
layer is compiled, dropout is replaced by our own operator, which makes only the mask, and arithmetic that the compiler
sees. The operator knows the name of the draw, and takes the generator from the running minibatch, as the eager operator
would. So dropout has the same bits as without compilation. Attention with dropout is written out as torch computes it
on a CPU. A graph with any other random operation is refused, and its layers run uncompiled.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_hetpipe.pipeline.random.operators import RandomnessError, RandomOperators
from lightning_hetpipe.torch_private.graphs import run_without_data

_NAME = "lightning_hetpipe"

GeneratorOf = Callable[[str, int, torch.device], torch.Generator]
"""Returns the generator for a module's path and the ordinal of its draw, in the minibatch that runs in this thread."""


class NoDropout(RandomnessError):
    """Error for a random operation that cannot be compiled."""


@functools.cache
def register(generator_of: GeneratorOf) -> Any:
    """Register the operator with torch, before anything is compiled. It lasts as long as the returned library."""
    new: Any = torch.library.Library  # torch has no types here
    library = new(_NAME, "DEF")
    tags = (torch.Tag.nondeterministic_seeded, torch.Tag.needs_exact_strides)  # never computed again in a backward
    library.define("kept(Tensor like, float keep, str path, int ordinal) -> Tensor", tags=tags)

    def kept(like: Tensor, keep: float, path: str, ordinal: int) -> Tensor:
        mask = torch.empty_like(like, dtype=torch.bool)
        return mask.bernoulli_(keep, generator=generator_of(path, ordinal, like.device))

    def shape(like: Tensor, keep: float, path: str, ordinal: int) -> Tensor:
        return torch.empty_like(like, dtype=torch.bool)

    library.impl("kept", kept, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAME}::kept", shape, lib=library)
    return library


class GraphDraws(TorchFunctionMode):
    """A mode in which dropouts of compiled code draw by our operator. ``draw`` returns path and ordinal of a draw."""

    def __init__(self, draw: Callable[[], tuple[str, int]]) -> None:
        super().__init__()
        self.draw = draw

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.dropout:
            return self._dropout(*args, **kwargs)
        if func in (functional.dropout2d, functional.dropout3d):
            return self._dropout(*args, **kwargs, features=True)
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, features: bool = False
    ) -> Tensor:
        if not training or p == 0.0:
            return input
        noise = _noise(input, p, *self.draw(), features=features)
        return input.mul_(noise) if inplace else input * noise

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if dropout_p == 0.0 or query.device.type != "cpu":
            return functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, *args, **kwargs)
        return _attention(*self.draw(), query, key, value, attn_mask, dropout_p, *args, **kwargs)


def draw_in_graph(path: str, ordinal: int, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``operator``, random operation ``ordinal`` of module ``path``, in a graph that is being compiled."""
    aten = torch.ops.aten
    if operator is aten.dropout.default:
        return args[0] * _noise(args[0], args[1], path, ordinal)
    if operator is aten.feature_dropout.default:
        return args[0] * _noise(args[0], args[1], path, ordinal, features=True)
    if operator is aten.scaled_dot_product_attention.default and args[0].device.type == "cpu":
        return _attention(path, ordinal, *args, **kwargs)
    raise NoDropout(f"'{path}' draws random numbers by {operator}, which is no dropout")


def refuse_other_draws(graph: fx.GraphModule, *, fused: bool = True) -> None:
    """Raise NoDropout for a ``graph`` that draws from a default generator (``fused``: :class:`RandomOperators`)."""
    with _Refusing(fused=fused):
        run_without_data(graph)


class _Refusing(RandomOperators):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operator = func
        if getattr(func, "namespace", None) == _NAME:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def generator(self, device: torch.device) -> torch.Generator:
        raise self.refuse(self.operator, "")

    def refuse(self, func: Any, way_out: str) -> NoDropout:
        return NoDropout(f"it draws random numbers by {func}, which is no dropout")


def _noise(value: Tensor, p: float, path: str, ordinal: int, *, features: bool = False) -> Tensor:
    """Return the factors by which dropout multiplies ``value``."""
    keep = 1.0 - p
    if keep == 0.0:  # like torch's dropout, this draws nothing
        return torch.zeros((), dtype=value.dtype, device=value.device)
    like = value.detach()
    if features:
        like = like.new_empty([*like.shape[:2], *[1] * (like.dim() - 2)])
    mask: Tensor = torch.ops.lightning_hetpipe.kept(like, keep, path, ordinal)
    return mask.to(value.dtype).div(keep)


def _attention(
    path: str,
    ordinal: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute torch's ``_scaled_dot_product_attention_math``, operator by operator."""
    root = math.sqrt(query.size(-1) ** -0.5 if scale is None else scale)
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    if is_causal:
        mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), -math.inf)
    scores = (query * root).matmul(key.transpose(-2, -1) * root)
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, -1)
    return (weights * _noise(weights, p, path, ordinal)).matmul(value)
