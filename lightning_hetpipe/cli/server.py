"""hetpipe-server: a parameter server from a Hydra configuration, until a signal ends it; or what a running one says."""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import closing
from typing import Any, NoReturn

import hydra
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_hetpipe.cli.composition import refusal
from lightning_hetpipe.cli.errors import FAILED, INTERRUPTED, TERMINATED, WRONG_SETTING, errors_passed_on, wants_all
from lightning_hetpipe.cli.settings import unknown
from lightning_hetpipe.cli.status import laid_out
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.security import Security, is_loopback, split
from lightning_hetpipe.server.transport import STATUS, Refused, Unreachable

_COMMANDS = ("serve", STATUS)
_KEYS = ["command", "address", "timeout", "security", "service"]
_SWEEP = {"-m", "--multirun", "hydra.mode=MULTIRUN"}
_SIGNALS = {2: INTERRUPTED, 15: TERMINATED}


class _Passed(BaseException):
    """Carries an error, its cause, out of Hydra, which would print an Exception in its own way first."""


def main() -> None:
    """The console script.

    Exit codes: 0; 1 for a failure, such as that nobody answers; 2 for a wrong setting; 130 for Ctrl-C; 143 for SIGTERM.
    """
    sys.path.insert(0, os.getcwd())  # so that `service._target_: mine.Service` finds ./mine.py
    if sys.argv[1:2] and sys.argv[1] in _COMMANDS:
        sys.argv[1] = f"command={sys.argv[1]}"
    if _SWEEP.intersection(sys.argv[1:]):
        _end_with(SettingError("-m would start servers one after another; start hetpipe-server once for each address."))
    asked_for_all = wants_all()
    try:
        with errors_passed_on():
            _application()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (_Passed, HydraException, OmegaConfBaseException) as caught:
        error = caught.__cause__ if isinstance(caught, _Passed) else caught
        assert isinstance(error, Exception)
        if asked_for_all:
            raise error from error.__cause__
        _end_with(error)


@hydra.main(config_path="pkg://lightning_hetpipe.conf", config_name="server", version_base="1.3")
def _application(config: DictConfig) -> None:
    try:
        run(config)
    except (SettingError, Refused, Unreachable, OmegaConfBaseException) as error:
        raise _Passed from error


def run(config: DictConfig) -> None:
    """Serves, or asks; prints what a person wants to know. Ends the process where it served.

    Raises:
        SettingError: for a setting that is unknown or wrong, or an address that cannot be had.
        Refused, Unreachable: by the server that is asked.
    """
    _check(config)
    security = Security(**OmegaConf.to_container(config.security, resolve=True))  # type: ignore[arg-type]
    security.check(config.address)
    if config.command != STATUS and security.token is None and not is_loopback(split(config.address)[0]):
        raise SettingError(
            f"address={config.address} is open to other machines, and HETPIPE_TOKEN is not set, so that anybody there"
            " could call; set it to a long random value, the same for all servers and virtual workers."
        )
    if config.command == STATUS:
        print(laid_out(ask(config.address, security, config.timeout)))
    else:
        _serve(config, security)


def ask(address: str, security: Security, timeout: float) -> dict[str, Any]:
    """What the server at ``address`` says about itself, within ``timeout`` seconds.

    Raises:
        SettingError: if address or certificates cannot be used.
        Refused: if it does not want to, or answers with something else.
        Unreachable: if nobody answers.
    """
    from lightning_hetpipe.server.grpc_transport import GrpcChannel  # only now: --help needs no gRPC

    with closing(GrpcChannel(address, security, shared_memory=False)) as channel:
        answer = channel.call(STATUS, b"", timeout=timeout)
    try:
        status = json.loads(answer)
    except ValueError:
        status = None
    if not isinstance(status, dict):
        raise Refused(f"the server at {address} answered with no status; is it of this release?")
    return status


def _serve(config: DictConfig, security: Security) -> NoReturn:
    from lightning_hetpipe.server.running import end, serve

    try:
        handler = instantiate(config.service, _convert_="all")
    except InstantiationException as error:
        raise SettingError(f"service: {' '.join(str(error).split())}; name a class that can be made so.") from error

    def ready(address: str) -> None:
        if security.token is None:
            print(
                "hetpipe-server: HETPIPE_TOKEN is not set, so that any user of this machine may connect; set it to a"
                " long random value, the same for all servers and virtual workers.",
                file=sys.stderr,
                flush=True,
            )
        print(f"hetpipe-server: serving {address}; Ctrl-C ends it.", flush=True)

    end(_SIGNALS.get(serve(handler, config.address, security, ready), 0))


def _check(config: DictConfig) -> None:
    for key in map(str, config):
        if key not in _KEYS:
            raise unknown(key, "", _KEYS)
    for key in map(str, config.security or {}):
        if key not in Security.__dataclass_fields__:
            raise unknown(key, "security", [*Security.__dataclass_fields__])
    if config.command not in _COMMANDS:
        raise SettingError(f"command={config.command} must be one of {', '.join(_COMMANDS)}.")
    if not isinstance(config.address, str):
        raise SettingError(f"address={config.address} must be host:port, such as 127.0.0.1:5000 or [::1]:5000.")
    if isinstance(config.timeout, bool) or not isinstance(config.timeout, int | float) or config.timeout <= 0:
        raise SettingError(f"timeout={config.timeout} must be a number of seconds above 0.")
    if not isinstance(config.security, DictConfig) or not isinstance(config.security.get("insecure"), bool):
        raise SettingError("security.insecure must be true or false.")
    if config.security.get("token") is not None and not OmegaConf.is_interpolation(config.security, "token"):
        raise SettingError(
            "security.token stands in the configuration, where others can read it; set HETPIPE_TOKEN instead."
        )


def _end_with(error: Exception) -> NoReturn:
    code = FAILED if isinstance(error, Refused | Unreachable) else WRONG_SETTING
    match = re.match(r"Could not override '([\w@/]+)'", " ".join(str(error).split()))
    if match and isinstance(error, HydraException):
        error = unknown(match[1], "", _KEYS)
    said = str(error) if isinstance(error, SettingError | Refused | Unreachable) else refusal(error, sys.argv[1:])
    print(f"hetpipe-server: {' '.join(said.split())}", file=sys.stderr)
    if code == WRONG_SETTING:
        print("(HYDRA_FULL_ERROR=1 shows where it was raised.)", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
