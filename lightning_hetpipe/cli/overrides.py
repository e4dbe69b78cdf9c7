"""Command-line overrides, before Hydra reads them."""

from __future__ import annotations

import re

# section.key=value; not hydra.*, which is Hydra's own, and nothing that bears a prefix (+, ++, ~) already.
_PLAIN = re.compile(r"(?!hydra\.)[A-Za-z_]\w*(\.\w+)+=")


def settled(arguments: list[str]) -> list[str]:
    """The arguments, with each `section.key=value` marked as `++`: override the key, or add it.

    Hydra alone refuses a key that the YAML leaves out and advises to add `+`. Here any argument that the section's
    `_target_` takes may be given without it, and `settings.check` refuses the others, with the nearest name.
    """
    return [f"++{argument}" if _PLAIN.match(argument) else argument for argument in arguments]
