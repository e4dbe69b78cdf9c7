"""Amounts as people write them: "24 GiB", "12 GB/s", "10 us"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

from lightning_hetpipe.errors import SettingError

_AMOUNT = re.compile(r"\s*(\d+(?:_\d+)*(?:\.\d*)?(?:[eE][+-]?\d{1,2})?)\s*([A-Za-zµμ][A-Za-zµμ/]*)?\s*")
_PREFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_PREFIXES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

BYTES = {f"{prefix}B": Decimal(factor) for prefix, factor in _PREFIXES.items()}
BANDWIDTHS = {f"{unit}/s": factor for unit, factor in BYTES.items()}
BANDWIDTHS |= {f"{prefix}bit/s": Decimal(factor) / 8 for prefix, factor in _PREFIXES.items()}
TIMES = {unit: Decimal(f"1e{power}") for unit, power in (("s", 0), ("ms", -3), ("us", -6), ("ns", -9))}
TIMES |= {"µs": TIMES["us"], "μs": TIMES["us"]}

_SHOWN = ("bytes", "KiB", "MiB", "GiB", "TiB")


def in_bytes(count: float) -> str:
    """Format a number of bytes: "1.5 GiB"."""
    size, unit = float(count), 0
    while abs(size) >= 1024 and unit < len(_SHOWN) - 1:
        size, unit = size / 1024, unit + 1
    return f"{count} {_SHOWN[0]}" if unit == 0 else f"{size:.1f} {_SHOWN[unit]}"


def digits(value: float) -> str:
    """Format a number with three digits, such as "0.123", or a large number with all its digits, such as "2,640"."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def in_bandwidth(rate: float) -> str:
    """Format bytes per second: "12 GB/s"."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6)):
        if rate >= size:
            return f"{rate / size:.3g} {unit}"
    return f"{rate:.3g} B/s"


def in_seconds(seconds: float) -> str:
    """Format seconds: "2.11 ms", "12 s"."""
    return f"{seconds:.3g} s" if seconds >= 1 or not seconds else f"{1000 * seconds:.3g} ms"


def bytes_of(given: float | str, setting: str) -> float:
    """Parse bytes: "24 GiB", "512 MB" or "1024". A number is returned unchanged. Errors name the ``setting``.

    Raises:
        SettingError: if the text is not such an amount.
    """
    return round(_amount(given, setting, BYTES, "'24 GiB' or '512 MB'")) if isinstance(given, str) else given


def bandwidth_of(given: float | str, setting: str) -> float:
    """Parse bytes per second, such as "12 GB/s" or "200 Mbit/s", like :func:`bytes_of`."""
    return float(_amount(given, setting, BANDWIDTHS, "'12 GB/s' or '200 Mbit/s'")) if isinstance(given, str) else given


def seconds_of(given: float | str, setting: str) -> float:
    """Parse seconds, such as "10 us" or "0.5 ms", like :func:`bytes_of`."""
    return float(_amount(given, setting, TIMES, "'10 us' or '0.5 ms'")) if isinstance(given, str) else given


def _amount(text: str, setting: str, units: Mapping[str, Decimal], example: str) -> Decimal:
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise SettingError(f"{setting}={text!r} must be a number and a unit, such as {example}")
    number, unit = Decimal(match[1]), match[2]
    if unit is None:
        return number
    factor = units.get(unit)
    if factor is None:
        # Vendors of networks write "Gbps" and "Gb/s".
        spelled = unit.replace("Bps", "B/s").replace("bps", "bit/s").replace("b/s", "bit/s")
        meant = [each for way in (spelled, unit) for each in units if each.lower() == way.lower()]
        alike = f"; did you mean '{meant[0]}'?" if meant else ""
        raise SettingError(f"{setting}={text!r} has the unit '{unit}', which is not among {', '.join(units)}{alike}")
    return number * factor
