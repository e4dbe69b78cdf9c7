"""Errors of Lightning: what it refuses on purpose, and checkpoints that it cannot restore, as a setting's fault."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator

from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from omegaconf import DictConfig

from lightning_hetpipe.cli.attribution import frames
from lightning_hetpipe.cli.start_up import FAILED, TERMINATED, WRONG_SETTING
from lightning_hetpipe.cli.targets import is_interpolation, sections, written
from lightning_hetpipe.launch import launcher
from lightning_hetpipe.server.process.server_process import ServerLost
from lightning_hetpipe.server.process.waits import ServersSilent
from lightning_hetpipe.server.protocol.identifiers import PeerFailed
from lightning_hetpipe.server.transport.interface import CallRefused, Unreachable

_CHECKPOINTS = "lightning.pytorch.trainer.connectors.checkpoint_connector"
_ACCELERATORS = ("lightning.pytorch.accelerators", "lightning.fabric.accelerators")
_LONGEST = 200  # characters that are quoted of an error whose text may go on for pages
_LIBRARIES = {"torch", "lightning", "lightning_hetpipe", "lightning_utilities", "torchmetrics", "fsspec", "numpy"}
_AROUND = {"hydra", "omegaconf", "__main__"}  # __main__ is this command, run as a module


def sentence(error: Exception, config: DictConfig) -> str | None:
    """Explain an error of Lightning in words of the configuration; None for a bug, or an error of users' code."""
    functions = [(module, tb.tb_frame.f_code.co_name) for tb, module in frames(error.__traceback__)]
    packages = {module.partition(".")[0] for module, _ in functions}
    users = not packages <= _LIBRARIES | sys.stdlib_module_names | _AROUND
    if isinstance(error, MisconfigurationException):
        return _with_setting(error, config)
    if users:
        return None
    restoring = _CHECKPOINTS in dict(functions) and (_CHECKPOINTS, "dump_checkpoint") not in functions
    if restoring and config.get("ckpt_path") is not None:
        return _checkpoint(error, config, read_by_torch="torch.serialization" in dict(functions))
    if not functions or not functions[-1][0].startswith("lightning."):
        return None
    if isinstance(error, ModuleNotFoundError) and any(module.startswith(_ACCELERATORS) for module, _ in functions):
        return f"trainer.accelerator={config.trainer.accelerator}: {_one_line(error)}; or set it to cpu, gpu or auto."
    if _is_raise(error):
        return _with_setting(error, config)
    fitting = ("lightning.pytorch.trainer.trainer", "fit") in functions
    return f"trainer: {_one_line(error)}" if isinstance(error, TypeError | ValueError) and not fitting else None


def exit_code(error: BaseException) -> int | None:
    """Exit code for a signal, and for what befell servers or another virtual worker; None for other errors."""
    if isinstance(error, SIGTERMException):
        return TERMINATED
    if isinstance(error, PeerFailed):  # its own error was printed when it was heard of
        return WRONG_SETTING if WRONG_SETTING in launcher.finish(failed=True).values() else FAILED
    return FAILED if isinstance(error, ServersSilent | ServerLost | CallRefused | Unreachable) else None


def _with_setting(error: Exception, config: DictConfig) -> str:
    """Lightning's own text, with the setting in front where the text names one."""
    text = _one_line(error)
    named: list[tuple[int, str]] = []
    valued: list[str] = []
    for setting, name, value in _of_lightning(config):
        place = re.search(rf"`{name}`|\b{name}=|(?<!\w){name}(?!\w)", text)
        has_value = value != "" and re.search(rf"(?<![\w.-]){re.escape(str(value))}(?![\w.])", text) is not None
        if place is not None and (has_value or place[0] != name):
            named.append((place.start(), f"{setting}={written(value)}: {text}"))
        elif has_value and isinstance(value, str):
            valued.append(f"{setting}={value}: {text}")
    return min(named)[1] if named else valued[0] if len(valued) == 1 else text


def _of_lightning(config: DictConfig) -> Iterator[tuple[str, str, object]]:
    """The settings of Lightning's own classes that hold a plain value: path, name and value."""
    for section in sections(config):
        if section.path.startswith(("trainer", "callbacks", "logger")) and str(section.target).startswith("lightning."):
            for name, value in section.given.items():
                if not isinstance(value, dict) and not is_interpolation(value):
                    yield f"{section.path}.{name}", name, value


def _checkpoint(error: Exception, config: DictConfig, read_by_torch: bool) -> str:
    """The sentence for an error while Lightning restored `ckpt_path`."""
    path, text = config.ckpt_path, _one_line(error)
    if holds := re.search(r"Unsupported global: GLOBAL (\S+)", text):
        return (
            f"ckpt_path={path} holds a {holds[1]}, which torch reads only from files that one trusts; if you trust this"
            " one, set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 in the environment."
        )
    reason = f"{type(error).__name__}: {text[:_LONGEST]}{'...' if len(text) > _LONGEST else ''}"
    return (
        f"ckpt_path={path} cannot be restored ({'torch cannot read it, ' if read_by_torch else ''}{reason}); give a"
        " checkpoint of this model and this trainer, or ckpt_path=null to begin anew."
    )


def _is_raise(error: Exception) -> bool:
    """Return whether a `raise` statement has raised it, not an operation that failed."""
    *_, (last, _) = frames(error.__traceback__)
    return linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno).strip().startswith("raise")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
