"""Command-line overrides, before Hydra reads them."""

from __future__ import annotations

import re
from operator import itemgetter

# section.key=value; not hydra.*, which is Hydra's own, and nothing that bears a prefix (+, ++, ~) already.
_PLAIN = re.compile(r"(?!hydra\.)[A-Za-z_]\w*(\.\w+)+=")
# A value with a = in it that is nothing of Hydra's own grammar (quoted, escaped, a list, a mapping, a sweep).
_WITH_EQUALS = re.compile(r"(\+{0,2}[A-Za-z_][\w.]*)=([^'\"\[{(,\\]*=[^'\"\[{(,\\]*)")
_OVERRIDE = re.compile(r"[^-].*=|~")
_PLAN = re.compile(r"\+{0,2}strategy\.plan=(?!null$)")
_PLANNED = ("strategy.stages", "strategy.in_flight")
# Hydra's options whose value is the next argument.
_WITH_VALUE = {"--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--package", "-p", "--cfg", "-c"}


def planned(arguments: list[str]) -> list[str]:
    """The arguments, and, where one gives a plan, that its stages and number in flight hold.

    Those of an experiment are what it has without a plan. What else stands here is left for the strategy to refuse.
    """
    if not any(_PLAN.match(argument) for argument in arguments):
        return arguments
    given = {argument.lstrip("+").partition("=")[0] for argument in arguments}
    return [*arguments, *(f"{name}=auto" for name in _PLANNED if name not in given)]


def settled(arguments: list[str]) -> list[str]:
    """The arguments, with each `section.key=value` marked as `++`: override the key, or add it.

    Hydra alone refuses a key that the YAML leaves out and advises to add `+`. Here any argument that the section's
    `_target_` takes may be given without it, and `settings.check` refuses the others, with the nearest name.

    They come last, as Hydra takes them in one row only: not `seed=3 -m model=gpt`.

    A value that holds a `=`, as the names of Lightning's checkpoints do, gets the quotes that Hydra wants around it.
    """
    quoted = [
        _WITH_EQUALS.sub(r"\1='\2'", argument) if _WITH_EQUALS.fullmatch(argument) else argument
        for argument in arguments
    ]
    marked = [f"++{argument}" if _PLAIN.match(argument) else argument for argument in quoted]
    is_override = [
        _OVERRIDE.match(argument) is not None and before not in _WITH_VALUE
        for before, argument in zip(["", *marked], marked, strict=False)
    ]
    return [argument for _, argument in sorted(zip(is_override, marked, strict=True), key=itemgetter(0))]
