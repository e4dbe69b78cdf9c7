"""Command-line overrides, before Hydra reads them."""

from __future__ import annotations

import re
from operator import itemgetter

# section.key=value; not hydra.*, which is Hydra's own, and nothing that bears a prefix (+, ++, ~) already.
_PLAIN = re.compile(r"(?!hydra\.)[A-Za-z_]\w*(\.\w+)+=")
# A value with a = in it that is nothing of Hydra's own grammar (quoted, escaped, a list, a mapping, a sweep).
_WITH_EQUALS = re.compile(r"(\+{0,2}[A-Za-z_][\w.]*)=([^'\"\[{(,\\]*=[^'\"\[{(,\\]*)")
_OVERRIDE = re.compile(r"[^-].*=|~")
# What says which stages there are, and what of an experiment's strategy it takes the place of.
_PLANS = (
    (re.compile(r"\+{0,2}strategy\.plan=(?!null$)"), ("strategy.stages", "strategy.in_flight")),
    (re.compile(r"\+{0,2}cluster=(?!default$)"), ("strategy.stages",)),
)
# Hydra's options whose value is the next argument.
_WITH_VALUE = {"--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--package", "-p", "--cfg", "-c"}


def planned(arguments: list[str]) -> list[str]:
    """The arguments and, where one gives a plan or devices, that an experiment's own stages do not hold.

    They are those that it has without. A plan says how many minibatches are in flight, too; for devices that stays as
    it is, since results depend on it. What else stands here holds, or is left for the strategy to refuse.
    """
    given = {argument.lstrip("+").partition("=")[0] for argument in arguments}
    replaced = [name for plan, names in _PLANS if any(map(plan.match, arguments)) for name in names]
    return [*arguments, *(f"{name}=auto" for name in dict.fromkeys(replaced) if name not in given)]


def settled(arguments: list[str]) -> list[str]:
    """The arguments, with each `section.key=value` marked as `++`: override the key, or add it.

    Hydra alone refuses a key that the YAML leaves out and advises to add `+`. Here any argument that the section's
    `_target_` takes may be given without it, and `config_checks.check` refuses the others, with the nearest name.

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
