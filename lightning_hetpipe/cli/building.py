"""Building of the object that a section of the configuration describes."""

from __future__ import annotations

from typing import Any, TypeVar

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_hetpipe.errors import SettingError

T = TypeVar("T")


def built(config: DictConfig, path: str, kind: type[T], **arguments: Any) -> T:
    """Build the section at ``path``, which must make a ``kind``.

    Raises:
        SettingError: if it is something else. What the section's `_target_` raises is raised as it is.
    """
    node: DictConfig = OmegaConf.select(config, path)
    try:
        made = instantiate(node, _convert_="all", **arguments)
    except InstantiationException as error:
        cause: BaseException = error
        while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
            cause = cause.__cause__
        raise cause from None
    if not isinstance(made, kind):
        other, package = type(made), kind.__module__.partition(".")[0]
        raise SettingError(
            f"{path}._target_={node['_target_']} makes a {other.__module__}.{other.__qualname__}, but {path} must be"
            f" a {package}.{kind.__name__}; name such a class, or a function that makes one."
        )
    return made
