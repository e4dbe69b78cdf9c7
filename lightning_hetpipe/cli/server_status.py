"""A server's status, laid out for a terminal, whatever fields it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.planning.plan.table import aligned


def laid_out(status: Mapping[str, Any]) -> str:
    """Single values as lines, lists of mappings as tables and mappings as sections, in that order.

    Fields whose names end in ``bytes`` get units. Nothing that the server sends is left out.
    """
    single = {key: value for key, value in status.items() if not isinstance(value, Mapping) and not _is_table(value)}
    parts = [_lines(single)] if single else []
    for key, value in status.items():
        if _is_table(value):
            parts.append(f"{_words(key)}\n{_table(value)}")
        elif isinstance(value, Mapping):
            parts.append(f"{_words(key)}\n{_indented(laid_out(value))}")
    return "\n\n".join(parts)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _lines(fields: Mapping[str, Any]) -> str:
    width = max(map(len, fields))
    return "\n".join(f"{_words(key).ljust(width)}  {_shown(key, value)}" for key, value in fields.items())


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    keys = [*dict.fromkeys(key for row in rows for key in row)]
    cells = [[_words(key) for key in keys], *([_shown(key, row.get(key)) for key in keys] for row in rows)]
    return _indented("\n".join(aligned(cells)))


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" if line else line for line in text.splitlines())


def _words(key: str) -> str:
    return _printable(key.replace("_", " "))


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("bytes") and isinstance(value, int):
        return in_bytes(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{_words(str(name))} {_shown(str(name), each)}" for name, each in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(_shown(key, each) for each in value) or "none"
    return _printable(f"{value:.3g}" if isinstance(value, float) else str(value))


def _printable(text: str) -> str:
    """Replace control characters, which could command the terminal: the text comes from another machine."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
