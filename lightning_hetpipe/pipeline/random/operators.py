"""Recipes that make each random operator of torch draw from a given generator, below autograd.

Most operators take a generator. ``rand`` and similar ones have an overload that does. Others are composed of operators
that do. CUDA's fused attention and RNN contain a dropout and read a default generator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.torch_private.modes import ThreadDispatchMode

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


class RandomnessError(RuntimeError):
    """A random operation inside the pipelined model that cannot be made independent of the pipeline's timing."""


class RandomOperators(ThreadDispatchMode):
    """A mode in which every random operator of this thread draws from the generator that ``generator`` returns. Without
    ``fused``, it refuses operators that contain a dropout but take no generator. With it they run as they are."""

    supports_higher_order_operators = True
    path = ""
    """Path of the running module, for messages."""

    def __init__(self, *, fused: bool = True) -> None:
        super().__init__()
        self.fused = fused

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator on ``device`` for the random operator that runs now."""
        raise NotImplementedError

    def is_plain(self) -> bool:
        """Return True if the running random operator must draw from a default generator, as without the mode."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Arguments = (), kwargs: Keywords | None = None) -> Any:
        recipe = _recipe(func)
        if recipe is None or self.is_plain():
            return func(*args, **(kwargs or {}))
        return recipe(self, func, args, dict(kwargs or {}))

    def refuse(self, func: Any, way_out: str) -> RandomnessError:
        return RandomnessError(
            f"Module '{self.path}' runs {func}, a random operation that takes no generator, so that its numbers"
            f" would depend on the pipeline's timing; {way_out}."
        )


Recipe = Callable[[RandomOperators, Any, Arguments, Keywords], Any]


def _filled(mode: RandomOperators, func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Run an operator that has an argument ``generator``."""
    device = _device(args, kwargs)
    if not _has_generator(args, kwargs) and device.type != "meta":
        kwargs["generator"] = mode.generator(device)
    return func(*args, **kwargs)


_OVERLOADS = {
    "default": "generator",
    "out": "generator_out",
    "low": "low_generator",
    "low_out": "low_generator_out",
    "low_dtype": "low_generator_dtype",
    "low_dtype_out": "low_generator_dtype_out",
    "Tensor": "Tensor_generator",
    "Tensor_out": "Tensor_generator_out",
}


def _factory(mode: RandomOperators, func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Run an operator with a second overload that takes a generator: rand.default has rand.generator."""
    overload = str(func).rpartition(".")[2]
    if "generator" not in overload and _device(args, kwargs).type != "meta":
        if overload not in _OVERLOADS:
            raise mode.refuse(func, "leave out the names of its dimensions")
        func = getattr(func.overloadpacket, _OVERLOADS[overload])
    return _filled(mode, func, args, kwargs)


def _native_dropout(mode: RandomOperators, func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Run F.dropout on CUDA. Autograd multiplies the gradient by the returned mask and by 1 / (1 - p)."""
    value, p, train = args
    if train is False or value.device.type == "meta":
        return func(*args, **kwargs)
    keep = 1.0 - p
    mask = torch.empty_like(value, dtype=torch.bool).bernoulli_(keep, generator=mode.generator(value.device))
    return value * mask * (1.0 / keep if keep else 0.0), mask


def _rrelu(mode: RandomOperators, func: Any, args: Arguments, kwargs: Keywords) -> Any:
    training = kwargs.get("training", args[4] if len(args) > 4 else False)
    return _filled(mode, func, args, kwargs) if training else func(*args, **kwargs)


def _composite(mode: RandomOperators, func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Run an operator composed of others, which inference mode does not decompose."""
    with mode:
        return func.decompose(*args, **kwargs)


def _fused(dropout: int, train: int | None = None) -> Recipe:
    """Make the recipe of operators with a dropout of probability ``args[dropout]``, if ``args[train]``."""

    def recipe(mode: RandomOperators, func: Any, args: Arguments, kwargs: Keywords) -> Any:
        p = kwargs.get("dropout_p", args[dropout] if len(args) > dropout else 0.0)
        if isinstance(p, float) and p > 0 and (train is None or args[train]) and not mode.fused:
            raise mode.refuse(
                func,
                "set its dropout to 0, leave Trainer(deterministic=...) unset, or switch the fused kernel off with"
                " torch.backends.cuda.enable_flash_sdp(False), enable_mem_efficient_sdp(False) and"
                " enable_cudnn_sdp(False) for attention, torch.backends.cudnn.enabled = False for an RNN",
            )
        return func(*args, **kwargs)

    return recipe


def _unknown(mode: RandomOperators, func: Any, args: Arguments, kwargs: Keywords) -> Any:
    if _has_generator(args, kwargs):
        return func(*args, **kwargs)
    raise mode.refuse(func, "pass it a torch.Generator, or draw with torch.rand, torch.randn or torch.bernoulli")


def _has_generator(args: Arguments, kwargs: Keywords) -> bool:
    return kwargs.get("generator") is not None or any(isinstance(arg, torch.Generator) for arg in args)


def _device(args: Arguments, kwargs: Keywords) -> torch.device:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    tensors = (value for value in (*args, kwargs.get("out")) if isinstance(value, Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


_BY_RECIPE: list[tuple[Recipe | None, str]] = [
    (
        _filled,
        "bernoulli bernoulli_ binomial cauchy cauchy_ exponential exponential_ geometric geometric_ log_normal"
        " log_normal_ multinomial normal normal_ normal_functional poisson random random_ uniform uniform_"
        " _standard_gamma _sample_dirichlet _fused_dropout",
    ),
    (_factory, "rand randn randint randperm rand_like randn_like randint_like"),
    (_native_dropout, "native_dropout"),
    (_rrelu, "rrelu_with_noise rrelu_with_noise_ rrelu_with_noise_functional"),
    (
        _composite,
        "dropout dropout_ feature_dropout feature_dropout_ alpha_dropout alpha_dropout_ feature_alpha_dropout"
        " feature_alpha_dropout_ rrelu rrelu_ lstm gru rnn_tanh rnn_relu scaled_dot_product_attention"
        " _scaled_dot_product_attention_math",
    ),
    (_fused(3), "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu"),
    (_fused(4), "_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math_for_mps"),
    (_fused(5), "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"),
    (_fused(7), "_flash_attention_forward"),
    (_fused(8), "_efficient_attention_forward"),
    (_fused(9), "_cudnn_attention_forward"),
    (_fused(0, train=1), "_cudnn_init_dropout_state"),
    (_fused(11, train=12), "_cudnn_rnn"),
    (_fused(9, train=10), "miopen_rnn"),
    (_fused(5, train=6), "_lstm_mps"),
    # Operators that torch marks as random, but that draw nothing themselves.
    (
        None,
        "_fused_sdp_choice _nested_tensor_softmax_with_shape _flash_attention_forward_no_dropout_inplace"
        " _fill_mem_eff_dropout_mask_ _cudnn_attention_backward _scaled_dot_product_cudnn_attention_backward"
        " _scaled_dot_product_efficient_attention_backward",
    ),
]
_RECIPES = {name: recipe for recipe, names in _BY_RECIPE for name in names.split()}


@functools.cache
def _recipe(func: Any) -> Recipe | None:
    """Return the recipe for ``func``, or None if it runs unchanged. Higher-order operators have no tags."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return None
    namespace, _, rest = str(func).partition(".")
    return _RECIPES.get(rest.partition(".")[0], _unknown) if namespace == "aten" else _unknown
