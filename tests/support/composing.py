"""Hydra without the work that it does again and again in one process; what it composes stays the same."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from omegaconf import base, grammar_parser

parsed_once = functools.lru_cache(None)(grammar_parser.parse)  # trees are only read


def compose_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra composes all of the configuration twice, first for hydra.mode alone, which no test sets.

    It reads the files of packages whenever it composes, merges the same ones again, prepares to resolve names in lists
    of defaults that hold none, and OmegaConf parses each interpolation whenever it is read, by a slow parser.
    """
    monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: None)
    monkeypatch.setattr(base, "parse", parsed_once)
    monkeypatch.setattr(defaults_list, "_create_interpolation_map", _choices)
    monkeypatch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", _merged_once)
    Plugins.instance()  # else no kind of source is known yet
    packages = SourcesRegistry.instance().resolve("pkg")
    monkeypatch.setattr(packages, "load_config", read_once(packages.load_config))


def read_once(read: Callable[..., Any]) -> Callable[..., Any]:
    def load_config(source: Any, config_path: str) -> Any:
        place = source.provider, source.path, config_path
        return _copy(place, lambda: read(source, config_path))

    return load_config


_kept: dict[Any, bytes] = {}
"""Configurations that were read and merged, pickled: to copy them takes a fifth of the time of ``deepcopy``."""

_merge = ConfigLoaderImpl._compose_config_from_defaults_list
_all_choices = defaults_list._create_interpolation_map


def _copy(key: Any, make: Callable[[], Any]) -> Any:
    if key not in _kept:
        _kept[key] = pickle.dumps(make())
    return pickle.loads(_kept[key])


def _choices(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
    return _all_choices(overrides, defaults, self_added) if any(each.is_interpolation() for each in defaults) else {}


def _merged_once(loader: Any, defaults: list[Any], repo: Any) -> Any:
    """Merge configurations. Merge each choice of packages' configurations once, because no test writes them."""
    sources = [(source.scheme(), source.provider, source.path) for source in repo.get_sources()]
    if any(scheme == "file" for scheme, *_ in sources):
        return _merge(loader, defaults, repo)
    return _copy(repr((defaults, sources)), lambda: _merge(loader, defaults, repo))
