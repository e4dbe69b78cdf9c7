"""Amounts as people write them."""

from __future__ import annotations

import pytest

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model.units import bandwidth_of, bytes_of, in_bytes, in_seconds, seconds_of


@pytest.mark.parametrize(
    ("text", "count"),
    [("24 GiB", 24 << 30), ("24GiB", 24 << 30), ("1.5 KiB", 1536), ("512 MB", 512_000_000), ("1024", 1024), ("7 B", 7)],
)
def test_bytes(text: str, count: int) -> None:
    assert bytes_of(text, "memory") == count


@pytest.mark.parametrize(
    ("text", "rate"), [("12 GB/s", 12e9), ("200 Mbit/s", 25e6), ("1 GiB/s", 2**30), ("1e9", 1e9), ("3 B/s", 3)]
)
def test_bandwidths(text: str, rate: float) -> None:
    assert bandwidth_of(text, "bandwidth") == pytest.approx(rate)


@pytest.mark.parametrize(
    ("text", "seconds"), [("10 us", 1e-5), ("10 µs", 1e-5), ("0.5 ms", 5e-4), ("2", 2), ("3 ns", 3e-9)]
)
def test_times(text: str, seconds: float) -> None:
    assert seconds_of(text, "latency") == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("10 Gbps", "Gbit/s"),
        ("10 gbps", "Gbit/s"),
        ("100 Mbps", "Mbit/s"),
        ("10 Gb/s", "Gbit/s"),
        ("10 GBps", "GB/s"),
        ("10 GB", None),
    ],
)
def test_bits_are_named_where_a_unit_could_be_them(text: str, meant: str | None) -> None:
    """Links are sold in "Gbps", which no error explained."""
    with pytest.raises(SettingError, match="which is not among") as refused:
        bandwidth_of(text, "bandwidth")
    assert str(refused.value).endswith(f"; did you mean '{meant}'?") == (meant is not None)


def test_bytes_for_people() -> None:
    assert [in_bytes(n) for n in (0, 1023, 1536, 24 << 30, 3 << 50)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "24.0 GiB",
        "3072.0 TiB",
    ]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0, "0 s"), (0.0021149, "2.11 ms"), (0.99, "990 ms"), (1.0, "1 s"), (12.34, "12.3 s")]
)
def test_times_for_people(seconds: float, shown: str) -> None:
    assert in_seconds(seconds) == shown
