"""Attribution of errors: which setting is at fault for one that ended a run, if one is."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_hetpipe.cli import config_checks
from lightning_hetpipe.cli.config_sections import as_given, is_interpolation, items, sections, written
from lightning_hetpipe.cli.message_text import in_settings
from lightning_hetpipe.cli.tracebacks import calls, innermost, passed, refused_by_lightning, through_users_code
from lightning_hetpipe.errors import SettingError

_CHECKPOINTS = "lightning.pytorch.trainer.connectors.checkpoint_connector"
_LONGEST = 200  # characters that are quoted of an error whose text may go on for pages
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


def attributed(error: Exception, config: DictConfig) -> SettingError | None:
    """The error in words of the configuration, its cause; None if the program is at fault, or users' code."""
    said: str | None
    if isinstance(error, SettingError):
        text = _one_line(error)
        said = text if innermost(error.__traceback__).startswith(__package__) else in_settings(text, config)
    elif isinstance(error, OmegaConfBaseException):
        said = _interpolation(error)
    elif isinstance(error, TypeError) and (refusal := config_checks.refused_argument(config, error)) is not None:
        said = str(refusal)
    else:
        said = _checkpoint(error, config) or _path(error, config) or _lightnings(error, config)
    if said is None:
        return None
    attributed = SettingError(said)
    attributed.__cause__ = error
    return attributed


def _lightnings(error: Exception, config: DictConfig) -> str | None:
    """Lightning's own text of what it refuses on purpose, with the setting in front where the text names one."""
    tb, text = error.__traceback__, _one_line(error)
    on_purpose = refused_by_lightning(tb)
    if not (on_purpose or isinstance(error, MisconfigurationException)):
        fitting = through_users_code(tb) or passed(tb, "lightning.pytorch.trainer.trainer", "fit")
        of_arguments = isinstance(error, TypeError | ValueError) and innermost(tb).startswith("lightning.")
        return f"trainer: {text}" if of_arguments and not fitting else None
    named: list[tuple[int, str]] = []
    valued: list[str] = []
    for setting, name, value in _of_lightning(config):
        place = re.search(rf"`{name}`|\b{name}=|(?<!\w){name}(?!\w)", text)
        has_value = value != "" and re.search(rf"(?<![\w.-]){re.escape(str(value))}(?![\w.])", text) is not None
        if place is not None and (has_value or place[0] != name):
            named.append((place.start(), f"{setting}={written(value)}: {text}"))
        elif has_value and on_purpose and isinstance(value, str):
            valued.append(f"{setting}={value}: {text}")
    return min(named)[1] if named else valued[0] if len(valued) == 1 else text


def _of_lightning(config: DictConfig) -> Iterator[tuple[str, str, object]]:
    """The settings of Lightning's own classes that hold a plain value: path, name and value."""
    for section in sections(config):
        if section.path.startswith("trainer") and str(section.target).startswith("lightning."):
            for name, value in section.given.items():
                if not isinstance(value, dict) and not is_interpolation(value):
                    yield f"{section.path}.{name}", name, value


def _checkpoint(error: Exception, config: DictConfig) -> str | None:
    """The sentence for an error while Lightning restored `ckpt_path`, but not for one of a user's hook."""
    path, passed_through = config.get("ckpt_path"), calls(error.__traceback__)
    if path is None or isinstance(error, MisconfigurationException) or through_users_code(error.__traceback__):
        return None
    modules = {module for module, _ in passed_through}
    if _CHECKPOINTS not in modules or (_CHECKPOINTS, "dump_checkpoint") in passed_through:
        return None
    text = _one_line(error)
    if holds := re.search(r"Unsupported global: GLOBAL (\S+)", text):
        return (
            f"ckpt_path={path} holds a {holds[1]}, which torch reads only from files that one trusts; if you trust this"
            " one, set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 in the environment."
        )
    reason = f"{type(error).__name__}: {text[:_LONGEST]}{'...' if len(text) > _LONGEST else ''}"
    return (
        f"ckpt_path={path} cannot be restored ({'torch cannot read it, ' if 'torch.serialization' in modules else ''}"
        f"{reason}); give a checkpoint of this model and this trainer, or ckpt_path=null to begin anew."
    )


def _path(error: Exception, config: DictConfig) -> str | None:
    """The sentence for a file or folder that cannot be used, where a setting is its path, or one on the way to it."""
    if not isinstance(error, OSError) or not isinstance(error.filename, str):
        return None
    wanted = os.path.abspath(error.filename)
    for setting, value in _texts(as_given(config), ""):
        path = os.path.abspath(value)
        on_the_way = wanted.startswith(path + os.sep) and (error.errno in _NOT_ALLOWED or not os.path.isdir(path))
        if wanted == path or on_the_way:
            return f"{setting}={value} cannot be used ({error.strerror}: {error.filename}); give another path."
    return None


def _texts(node: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every text in a plain configuration that is written there, not taken from elsewhere by an interpolation."""
    for inner, key, value in items(node, path):
        if isinstance(value, str) and value and key != "_target_" and not is_interpolation(value):
            yield inner, value
        yield from _texts(value, inner)


def _interpolation(error: OmegaConfBaseException) -> str:
    """The sentence for `${data.context}` where the data that was chosen has no context, say."""
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    key = str(error.full_key or "")
    if not key:
        return first
    experiment = _experiment_for(key)
    advice = f"choose experiment={experiment}, which has what that needs, or give" if experiment else "give"
    return f"{key}: {first}; {advice} {key}=..."


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
