"""Comparison of two VWs' training signatures."""

from __future__ import annotations

from dataclasses import fields

from lightning_hetpipe.server.protocol.messages import Parameter, TrainingSignature


def difference(first: TrainingSignature, other: TrainingSignature) -> str | None:
    """Describe the first difference of ``other`` from that of the VW that came first; ``None`` if they are equal."""
    for mine, theirs in zip(first.settings, other.settings, strict=False):
        if mine != theirs:
            return f"'{theirs}' instead of '{mine}'"
    for field in fields(TrainingSignature):
        a, b = getattr(first, field.name), getattr(other, field.name)
        if field.name not in ("settings", "parameters", "least") and a != b:
            return f"{field.name.replace('_', ' ')}: {b!r} instead of {a!r}"
    if len(first.settings) != len(other.settings):
        return f"settings: {', '.join(other.settings)} instead of {', '.join(first.settings)}"
    names = [parameter.name for parameter in first.parameters]
    known = {parameter.name: parameter for parameter in first.parameters}
    others = {parameter.name: parameter for parameter in other.parameters}
    for name in names:
        if name not in others:
            return f"parameter '{name}' is missing"
    for name, parameter in others.items():
        if name not in known:
            return f"parameter '{name}' is not known to the others"
        if parameter != known[name]:
            return f"parameter '{name}' is {_described(parameter)} instead of {_described(known[name])}"
    if names != [parameter.name for parameter in other.parameters]:
        return "the order of the parameters"
    return None


def _described(parameter: Parameter) -> str:
    sent = "" if parameter.update_dtype == parameter.dtype else f" sent as {parameter.update_dtype}"
    return f"{parameter.dtype} {list(parameter.shape)}{sent}"
