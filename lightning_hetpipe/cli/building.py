"""Builds what a section of the configuration stands for."""

from __future__ import annotations

from typing import Any, TypeVar

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_hetpipe.cli.blame import unwrapped
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.strategy.other_lightning import is_of_other, way_out

T = TypeVar("T")

NAME_ANOTHER = "name such a class, or a function that makes one"


def built(config: DictConfig, path: str, kind: type[T], **arguments: Any) -> T:
    """What the section at ``path`` stands for, of which the run needs that it is a ``kind``.

    Raises:
        SettingError: if it is something else.
    """
    node: DictConfig = OmegaConf.select(config, path)
    try:
        made = instantiate(node, _convert_="all", **arguments)
    except InstantiationException as error:
        raise unwrapped(error) from None
    if not isinstance(made, kind):
        other, package = type(made), kind.__module__.partition(".")[0]
        raise SettingError(
            f"{path}._target_={node['_target_']} makes a {other.__module__}.{other.__qualname__}, but {path} must be"
            f" a {package}.{kind.__name__}; {way_out() if is_of_other(made) else NAME_ANOTHER}."
        )
    return made
