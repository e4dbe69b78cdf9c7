"""Settings of Wave Synchronous Parallel, checked, on which virtual workers and servers agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.transport.security import Security


@dataclass(frozen=True)
class WSPSettings:
    """Checked arguments of a :class:`WSPCallback`. ``left_out`` names the settings that nobody has set. They have their
    defaults here, and a plan decides them."""

    clock_distance: int
    wave: int | Literal["auto"]
    shares: tuple[int, ...] | Literal["equal", "auto"]
    aggregate: str
    update_dtype: str | None
    servers: tuple[str, ...] | None
    placement: str
    security: Security
    lease: float
    end_timeout: float | None
    join_timeout: float
    restarts: int = 0
    left_out: frozenset[str] = frozenset()

    def check_later(self, later: WSPSettings) -> None:
        """Raise SettingError if a later Trainer of the program has other servers or another security."""
        if later.servers != self.servers:
            given, known = (None if each is None else list(each) for each in (later.servers, self.servers))
            raise SettingError(
                f"servers={given!r}, but an earlier Trainer of this program had servers={known!r}, where its virtual"
                " workers still are; give all of the program's Trainers the same"
            )
        if later.security != self.security:
            raise SettingError(
                "security differs from what an earlier Trainer of this program had, whose servers still run; give all"
                " of the program's Trainers the same"
            )
