"""Which setting is to blame for an error that ended a run, if one is."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_hetpipe.cli import settings
from lightning_hetpipe.cli.frames import frames, innermost, module, passed, refused_by_lightning, through_users_code
from lightning_hetpipe.cli.wording import as_written, is_interpolation, sections, unresolved, written
from lightning_hetpipe.errors import SettingError

_CHECKPOINTS = "lightning.pytorch.trainer.connectors.checkpoint_connector"
_LONGEST = 200  # characters that are quoted of an error whose text may go on for pages
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


def blamed(error: Exception, config: DictConfig) -> Exception | None:
    """The error in words of the configuration, if a setting is at fault; None if the program is, or users' code.

    What comes back is a `MisconfigurationException`, its cause the error.
    """
    said = _said(error, config)
    if said is None:
        return None
    refusal = SettingError(said)
    refusal.__cause__ = error
    return refusal


def unwrapped(error: InstantiationException) -> BaseException:
    """What a section's `_target_` raised, without what Hydra says around it."""
    cause: BaseException = error
    while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
        cause = cause.__cause__
    return cause


def _said(error: Exception, config: DictConfig) -> str | None:
    if isinstance(error, SettingError):
        text = _one_line(error)
        return text if innermost(error.__traceback__).startswith(__package__) else as_written(text, config)
    if isinstance(error, OmegaConfBaseException):
        return _interpolation(error)
    if isinstance(error, TypeError) and (refusal := settings.refused_argument(config, error)) is not None:
        return str(refusal)
    return _checkpoint(error, config) or _path(error, config) or _lightnings(error, config)


def _lightnings(error: Exception, config: DictConfig) -> str | None:
    """What Lightning refuses on purpose, whatever the exception's type, with the setting in front if it can be told."""
    on_purpose = refused_by_lightning(error.__traceback__)
    if not (on_purpose or isinstance(error, MisconfigurationException) or _of_lightnings_arguments(error)):
        return None
    text = _one_line(error)
    if not on_purpose and not isinstance(error, MisconfigurationException):
        return f"trainer: {text}"
    named: list[tuple[int, str]] = []
    valued: list[str] = []
    for setting, name, value in _plain_settings(config):
        place = re.search(rf"`{name}`|\b{name}=|(?<!\w){name}(?!\w)", text)
        has_value = value != "" and re.search(rf"(?<![\w.-]){re.escape(str(value))}(?![\w.])", text) is not None
        if place is not None and (has_value or place[0] != name):
            named.append((place.start(), f"{setting}={written(value)}: {text}"))
        elif has_value and on_purpose and isinstance(value, str):
            valued.append(f"{setting}={value}: {text}")
    return min(named)[1] if named else valued[0] if len(valued) == 1 else text


def _of_lightnings_arguments(error: Exception) -> bool:
    """Whether something of Lightning's could not work with its arguments while it was built."""
    tb = error.__traceback__
    if through_users_code(tb) or passed(tb, "lightning.pytorch.trainer.trainer", "fit"):
        return False
    return isinstance(error, TypeError | ValueError) and innermost(tb).startswith("lightning.")


def _plain_settings(config: DictConfig) -> Iterator[tuple[str, str, object]]:
    """The settings of Lightning's own classes that hold a plain value: path, name and value."""
    for path, node in sections(unresolved(config)):
        if path.startswith("trainer") and node["_target_"].startswith("lightning."):
            for name, value in node.items():
                if name != "_target_" and not isinstance(value, dict) and not is_interpolation(value):
                    yield f"{path}.{name}", name, value


def _checkpoint(error: Exception, config: DictConfig) -> str | None:
    """What went wrong while Lightning restored `ckpt_path`, but for errors of a user's hook that it called."""
    path = config.get("ckpt_path")
    if path is None or isinstance(error, MisconfigurationException) or through_users_code(error.__traceback__):
        return None
    calls = [(module(frame), frame.tb_frame.f_code.co_name) for frame in frames(error.__traceback__)]
    if not any(name == _CHECKPOINTS for name, _ in calls) or (_CHECKPOINTS, "dump_checkpoint") in calls:
        return None
    text = _one_line(error)
    if holds := re.search(r"Unsupported global: GLOBAL (\S+)", text):
        return (
            f"ckpt_path={path} holds a {holds[1]}, which torch reads only from files that one trusts; if you trust this"
            " one, set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 in the environment."
        )
    reason = f"{type(error).__name__}: {text[:_LONGEST]}{'...' if len(text) > _LONGEST else ''}"
    if any(name == "torch.serialization" for name, _ in calls):
        reason = f"torch cannot read it, {reason}"
    return (
        f"ckpt_path={path} cannot be restored ({reason}); give a checkpoint of this model and this trainer, or"
        " ckpt_path=null to begin anew."
    )


def _path(error: Exception, config: DictConfig) -> str | None:
    """A file or folder that cannot be used, where a setting says that very path, or one on the way to it."""
    if not isinstance(error, OSError) or not isinstance(error.filename, str):
        return None
    wanted = os.path.abspath(error.filename)
    for setting, value in _paths(unresolved(config)):
        path = os.path.abspath(value)
        on_the_way = wanted.startswith(path + os.sep) and (error.errno in _NOT_ALLOWED or not os.path.isdir(path))
        if wanted == path or on_the_way:
            return f"{setting}={value} cannot be used ({error.strerror}: {error.filename}); give another path."
    return None


def _paths(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a plain configuration that is written there, not taken from elsewhere by an interpolation."""
    if isinstance(node, list):
        node = dict(enumerate(node))
    if isinstance(node, dict):
        for key, value in node.items():
            if key != "_target_":
                yield from _paths(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, str) and node and not is_interpolation(node):
        yield path, node


def _interpolation(error: OmegaConfBaseException) -> str:
    """`${data.context}` where the data that was chosen has no context, say."""
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    key = str(error.full_key or "")
    if not key:
        return first
    if (experiment := _experiment_for(key)) is not None:
        return f"{key}: {first}; choose experiment={experiment}, which has what that needs, or give {key}=..."
    return f"{key}: {first}; give {key}=..."


def _experiment_for(key: str) -> str | None:
    """The experiment that is called what was chosen for the key's section, if another one is running."""
    loader = GlobalHydra.instance().hydra
    if not HydraConfig.initialized() or loader is None:
        return None
    choices = HydraConfig.get().runtime.choices
    chosen = choices.get(key.split(".")[0])
    experiments = loader.config_loader.get_group_options("experiment")
    return chosen if chosen in experiments and chosen != choices.get("experiment") else None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
