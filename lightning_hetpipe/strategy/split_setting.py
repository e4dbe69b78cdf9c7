"""The ``split`` setting: which stages lie on a group of devices, and what each of these is to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.rules.channel_layouts import is_share

Shares = Mapping[int, Sequence[float]]
"""By stage, the share of each of its devices."""


def shares(value: Any, plan: Plan | None) -> dict[int, tuple[float, ...]] | Literal["auto"]:
    """Shares of each stage that is to lie on a group; none for ``split=False``, and "auto" where the planner chooses.

    Raises:
        SettingError: for another value, and beside a plan, which says itself what is divided.
    """
    if value is False:
        return {}
    if chooses(value):
        if plan is not None:
            raise SettingError(f"split={value!r}, but the plan says which stages have several devices; leave split out")
        return "auto"
    if not isinstance(value, Mapping) or not value:
        raise SettingError(
            f"split={value!r} must be False, True or 'auto', or give for each stage on several devices their shares,"
            " such as {0: [2, 1]}"
        )
    if plan is not None:
        raise SettingError(
            f"split={dict(value)!r}, but the plan says which stages have several devices; leave split out, or plan"
        )
    return {_stage(stage): _of_stage(stage, own) for stage, own in value.items()}


def chooses(value: Any) -> bool:
    """Return True for a ``value`` of the setting that leaves it to the planner which devices are joined."""
    return value is True or value == "auto"


def _stage(stage: Any) -> int:
    if str(stage).isdecimal() and not isinstance(stage, bool):  # configurations have text as keys
        return int(stage)
    raise SettingError(f"split has {stage!r} for a stage, and must have its number, from 0 on")


def _of_stage(stage: Any, own: Any) -> tuple[float, ...]:
    is_list = isinstance(own, Sequence) and not isinstance(own, str) and len(own) > 1
    numbers = [each for each in own if isinstance(each, int | float) and not isinstance(each, bool)] if is_list else []
    if not is_list or len(numbers) != len(own) or not all(map(is_share, numbers)) or not any(numbers):
        raise SettingError(
            f"split[{stage!r}]={own!r} must be a share for each of at least two devices, 0 or more, such as [2, 1]; the"
            " first one's is that of the device with the unsplit weights"
        )
    return tuple(map(float, numbers))
