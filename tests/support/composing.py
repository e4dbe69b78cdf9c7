"""Hydra without the work that it does again and again in one process; what it composes stays the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from hydra._internal.hydra import Hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from omegaconf import base, grammar_parser

parsed_once = functools.lru_cache(None)(grammar_parser.parse)  # trees are only read


def compose_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra composes all of the configuration twice, first for hydra.mode alone, which no test sets.

    It reads the files of packages whenever it composes, and OmegaConf parses each interpolation whenever it is read, by
    a slow parser.
    """
    monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: None)
    monkeypatch.setattr(base, "parse", parsed_once)
    Plugins.instance()  # else no kind of source is known yet
    packages = SourcesRegistry.instance().resolve("pkg")
    monkeypatch.setattr(packages, "load_config", read_once(packages.load_config))


def read_once(read: Callable[..., Any]) -> Callable[..., Any]:
    def load_config(source: Any, config_path: str) -> Any:
        place = source.provider, source.path, config_path
        if place not in _files:
            _files[place] = read(source, config_path)
        return deepcopy(_files[place])

    return load_config


_files: dict[tuple[str, str, str], Any] = {}
