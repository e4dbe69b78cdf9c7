"""Equality of nested values, bit for bit, that says where two of them differ."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor


def difference(expected: Any, actual: Any, where: str = "", ordered: bool = False) -> str | None:
    """The first place below ``where`` at which nested containers or dataclasses differ by a bit; None if equal.

    Args:
        expected: A tensor, a container of such, or anything that ``==`` compares.
        actual: The same.
        where: Its name.
        ordered: Whether dicts with the same keys in another order differ.
    """
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        if expected.shape != actual.shape or expected.dtype != actual.dtype:
            return f"{where}: {tuple(expected.shape)} {expected.dtype} != {tuple(actual.shape)} {actual.dtype}"
        if expected.layout is not actual.layout:
            return f"{where}: {expected.layout} != {actual.layout}"
        expected, actual = expected.to_dense().cpu(), actual.to_dense().cpu()  # as a rule the tensors themselves
        if torch.equal(expected, actual):
            return None
        number = ~(expected.isnan() & actual.isnan())  # what is no number is equal to itself here
        if torch.equal(expected[number], actual[number]):
            return None
        return f"{where} differs by up to {(expected.double() - actual.double()).abs().max().item():.3g}"
    if is_dataclass(expected) and type(expected) is type(actual):
        return difference(vars(expected), vars(actual), where, ordered)
    if isinstance(expected, dict) and isinstance(actual, dict):
        if expected.keys() != actual.keys() or (ordered and list(expected) != list(actual)):
            return f"{where} has {list(actual)} instead of {list(expected)}"
        pairs = ((f"{where}[{key!r}]", expected[key], actual[key]) for key in expected)
    elif isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)):
        if len(expected) != len(actual):
            return f"{where} has {len(actual)} entries instead of {len(expected)}"
        pairs = ((f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(expected, actual, strict=True)))
    else:
        return None if expected == actual else f"{where} is {actual!r} instead of {expected!r}"
    return next((found for place, a, b in pairs if (found := difference(a, b, place, ordered)) is not None), None)


def assert_same(expected: Any, actual: Any, where: str = "it", ordered: bool = False) -> None:
    """Fails with the first difference below ``where``."""
    found = difference(expected, actual, where, ordered)
    assert found is None, found
