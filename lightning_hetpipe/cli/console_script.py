"""Console scripts: the settings at the top of their configurations, and their ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

WRONG_SETTING = 2
FAILED = 1
INTERRUPTED = 130  # as a shell reports a program that SIGINT ended
TERMINATED = 143  # likewise, SIGTERM


@dataclass(frozen=True)
class ConsoleScript:
    """A console script.

    Attributes:
        name: As it is called.
        groups: Sections at the top, most of them files to choose from.
        settings: Values at the top of its configuration, with their annotations.
        sentence: Explains an error of a library in words of the configuration; None if no setting is at fault.
        exit_code: Exit code for an error whose text says all; None for a bug, which is shown with its traceback.
    """

    name: str
    groups: tuple[str, ...]
    settings: Mapping[str, Any]
    sentence: Callable[[Exception, DictConfig], str | None] = lambda error, config: None
    exit_code: Callable[[BaseException], int | None] = lambda error: None

    @property
    def read(self) -> list[str]:
        """Every name at the top that is read."""
        return [*self.groups, *self.settings]
