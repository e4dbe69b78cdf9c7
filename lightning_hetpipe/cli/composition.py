"""Command line: prepare overrides for Hydra, and make a sentence of an error before a configuration is composed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from operator import itemgetter

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from lightning_hetpipe.cli.config_checks import unknown_at_top
from lightning_hetpipe.cli.start_up import ConsoleScript
from lightning_hetpipe.errors import closest, first_line, one_line
from lightning_hetpipe.launch.command import told_apart
from lightning_hetpipe.settings import unknown

_MERGING = re.compile(r"Error merging override ((.*?)(?:=.*)?)$")
SWEEPS = {"-m", "--multirun", "hydra.mode=MULTIRUN"}


def refusal(error: BaseException, arguments: Sequence[str], program: ConsoleScript) -> str:
    """Return the sentence for an error that was raised while the command line and the files were read.

    Return Hydra's own text, unless it lacks the setting or the way out. ``error`` may be of any type: an OSError for a
    folder that cannot be made, YAML's error for a broken file.
    """
    text, cause = one_line(error).replace("++", ""), error.__cause__  # `settled` adds "++"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        near = closest(name, list(error.options))
        advice = f"did you mean {group}={near}?" if near else "choose one of them."
        return f"{group}={name} does not exist among {', '.join(error.options)}; {advice}"
    if isinstance(error, OverrideParseException):
        override = error.override.replace("++", "")
        return (
            f"{override} cannot be read; write section.key=value, in quotes where it has spaces ({first_line(error)})."
        )
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {first_line(error)}; give {error.full_key}=..."
    if isinstance(cause, ConfigKeyError) and "." in (cause.full_key or "") and cause.parent_node is not None:
        section, _, key = str(cause.full_key).rpartition(".")  # a key in a mapping on the command line
        return str(unknown(key, section, list(map(str, cause.parent_node))))
    if match := _MERGING.match(text):
        reason = first_line(cause or error)
        if reason.startswith("Cannot merge"):
            reason = f"it would replace a whole section, which takes two: '~{match[2]}' '+{match[1]}'"
        return f"{match[1]} is refused: {reason}"
    for failed in (error, cause):  # if a log file cannot be opened, `logging` has the OSError as the cause
        if isinstance(failed, OSError) and failed.filename is not None:
            return (
                f"{failed.filename} cannot be used ({failed.strerror}); give a folder that can be written as"
                " hydra.run.dir=..., or hydra.sweep.dir=... with -m."
            )
    with suppress(OverrideParseException):  # of an override that Hydra has not reached
        text = _wrong_override(error, arguments, program) or text
    return text


def _wrong_override(error: BaseException, arguments: Sequence[str], program: ConsoleScript) -> str | None:
    """Return the sentence for the first override that is wrong whatever the files say, or None."""
    overrides = [argument for argument, is_override in told_apart(arguments) if is_override]
    parsed = OverridesParser.create().parse_overrides(overrides)
    for each in parsed:
        key, line = each.key_or_group, str(each.input_line).lstrip("+")
        if each.is_sweep_override() and not SWEEPS.intersection(arguments):
            several = line.partition("=")[2]
            return f"{line} is several values; add -m to run with each of them, or write {key}=[{several}] for a list."
        is_choice = each.is_delete() or each.is_sweep_override() or isinstance(each.value(), str | list)
        if key in program.groups and not is_choice:
            return f"{line} names no option of {key}; choose one of those that {program.name} --help lists."
        if not each.is_add() and not re.match(rf"(hydra|{'|'.join(program.read)})\b", key):
            return str(unknown_at_top(key, program))
    if isinstance(error, ConfigCompositionException) and (gone := [each for each in parsed if each.is_delete()]):
        lines, keys = " ".join(str(each.input_line) for each in gone), " or ".join(each.key_or_group for each in gone)
        return f"{lines} takes nothing away, as there is no {keys}, or it is null; leave that out."
    return None


# section.key=value without a prefix (+, ++, ~). hydra.* is Hydra's own.
_PLAIN = re.compile(r"(?!hydra\.)[A-Za-z_]\w*(\.\w+)+=")
# A value that contains a = and is not in Hydra's own grammar (quoted, escaped, a list, a mapping, a sweep).
_WITH_EQUALS = re.compile(r"^(\+{0,2}[A-Za-z_][\w.]*)=([^'\"\[{(,\\]*=[^'\"\[{(,\\]*)\Z")
# Overrides that decide which stages there are, and the settings of an experiment's strategy that they replace.
_PLANS = (
    (re.compile(r"\+{0,2}strategy\.plan=(?!null$)"), ("strategy.stages", "strategy.in_flight")),
    (re.compile(r"\+{0,2}cluster=(?!default$)"), ("strategy.stages",)),
)


def planned(arguments: list[str]) -> list[str]:
    """Add overrides that set an experiment's own stages to auto, if an argument gives a plan or devices.

    A plan also decides Nm. Devices leave Nm as it is, because results depend on it. Stages and Nm on the command line
    stay, and the strategy refuses them if they contradict the plan.
    """
    given = {argument.lstrip("+").partition("=")[0] for argument in arguments}
    replaced = [name for plan, names in _PLANS if any(map(plan.match, arguments)) for name in names]
    return [*arguments, *(f"{name}=auto" for name in dict.fromkeys(replaced) if name not in given)]


def settled(arguments: list[str]) -> list[str]:
    """Mark each `section.key=value` with `++`, so that Hydra overrides the key or adds it.

    Hydra alone refuses a key that the YAML leaves out, and asks for a `+`. Here users give any argument of the
    section's `_target_` without it, and `config_checks.check` refuses other keys with the nearest name. Overrides go
    last, because Hydra takes them in one row only: not `seed=3 -m model=gpt`. A value that contains a `=`, as names of
    Lightning's checkpoints do, gets the quotes that Hydra needs.
    """
    quoted = [_WITH_EQUALS.sub(r"\1='\2'", argument) for argument in arguments]
    marked = [f"++{argument}" if _PLAIN.match(argument) else argument for argument in quoted]
    return [argument for argument, _ in sorted(told_apart(marked), key=itemgetter(1))]
