"""Release of this package, which processes that call each other must have in common."""

from __future__ import annotations

from importlib import metadata

RELEASE = metadata.version("lightning-hetpipe")
