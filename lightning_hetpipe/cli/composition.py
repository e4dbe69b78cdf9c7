"""Refusals of Hydra, from before a configuration is composed, in the words of this command line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from lightning_hetpipe.cli.config_checks import unknown
from lightning_hetpipe.cli.console_script import TRAIN, ConsoleScript
from lightning_hetpipe.cli.targets import closest

_NO_OPTION = re.compile(r"\+*(?P<group>\w[\w/@]*)=(?P<value>null|true|false|[\d.]*)", re.IGNORECASE)
_UNKNOWN = re.compile(r"Could not (?:override|append to config|find match) [^']*'([\w@/]+)'")
_MERGING = re.compile(r"Error merging override ((.*?)(?:=.*)?)$")
_SAID = (
    (
        r"Ambiguous value for argument '([^=]*)=(.*?)' ",
        r"\1=\2 is several values; add -m to run with each of them, or write \1=[\2] for a list.",
    ),
    (
        r"Multiple values for (\S+)\. .*'override (\S+): (\S+)'.*",
        r"\1 is chosen twice; write \2=\3 without a + on the command line, and '- override /\2: \3' in a file.",
    ),
    (
        r"Could not delete from config\. '(\S+)'.*",
        r"~\1 takes nothing away, as there is no \1, or it is null; leave that out.",
    ),
)
"""What Hydra says, and what is said instead."""


def refusal(error: BaseException, arguments: Sequence[str], program: ConsoleScript = TRAIN) -> str:
    """The sentence for an error that Hydra raised while it read the command line and the files.

    Args:
        error: of any type; a folder that cannot be made is an OSError, a broken file one of YAML's.
        arguments: the command line's.
        program: whose configuration it is.
    """
    if isinstance(error, MissingConfigException):
        return _missing_config(error)
    if isinstance(error, OverrideParseException):
        # The ++ is what `overrides.settled` put there.
        override, reason = error.override.replace("++", ""), _first_line(error).replace("++", "")
        return f"{override} cannot be read; write section.key=value, in quotes where it has spaces ({reason})."
    if isinstance(error, HydraException):
        return _composition(error, program)
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {_first_line(error)}; give {error.full_key}=..."
    if (mark := getattr(error, "problem_mark", None)) is not None:  # YAML's
        problem = getattr(error, "problem", None)
        return f"{mark.name}, line {mark.line + 1}, is no YAML that can be read ({problem}); mend that line."
    if isinstance(error, UnicodeDecodeError):
        return f"A configuration file is not text in UTF-8 ({error}); save it as such."
    for failed in (error, error.__cause__):  # of a log file that cannot be opened, `logging` says in the cause
        if isinstance(failed, OSError) and failed.filename is not None:
            return (
                f"{failed.filename} cannot be used ({failed.strerror}); give a folder that can be written as"
                " hydra.run.dir=..., or hydra.sweep.dir=... with -m."
            )
    if str(error).startswith("Config group override must be"):  # which says neither what it was nor what to write
        for match in filter(None, map(_NO_OPTION.fullmatch, arguments)):
            if match["group"] not in program.settings:
                choose = f"choose one of those that {program.name} --help lists."
                return f"{match[0]} names no option of {match['group']}; {choose}"
    return _first_line(error)


def _missing_config(error: MissingConfigException) -> str:
    """The sentence for `group=name` where the group has no such option."""
    if not error.missing_cfg_file or not error.options:
        return _first_line(error)
    group, _, name = error.missing_cfg_file.rpartition("/")
    near = closest(name, list(error.options))
    advice = f"did you mean {group}={near}?" if near else "choose one of them."
    return f"{group}={name} does not exist among {', '.join(error.options)}; {advice}"


def _composition(error: HydraException, program: ConsoleScript) -> str:
    """The sentence for an override that fits nowhere, such as `modle=resnet`."""
    text = " ".join(str(error).split()).replace("++", "")
    inner = error.__cause__  # of a mapping on the command line, a key in it
    if isinstance(inner, ConfigKeyError) and "." in (inner.full_key or "") and inner.parent_node is not None:
        section, _, key = str(inner.full_key).rpartition(".")
        if (near := closest(key, list(map(str, inner.parent_node)))) is not None:
            return f"{inner.full_key} is not a setting; did you mean {section}.{near}?"
        return f"{section}={{...}} takes no {key} that the files have not; write {inner.full_key}=... instead"
    if match := _UNKNOWN.match(text):
        return str(unknown(match[1], "", [*program.read, *(["experiment"] if program.experiments else [])]))
    if match := _MERGING.match(text):
        cause = _first_line(error.__cause__ or error)
        if cause.startswith("Cannot merge"):
            return f"{match[1]} cannot replace a whole section; write '~{match[2]}' '+{match[1]}'"
        return f"{match[1]} is refused: {cause}"
    for pattern, said in _SAID:
        if match := re.match(pattern, text):
            return match.expand(said)
    return text


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
