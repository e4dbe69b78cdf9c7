"""hetpipe-plan: which layers to run on which device, how many minibatches in flight, and what to expect of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_hetpipe.cli import settings
from lightning_hetpipe.cli.building import built
from lightning_hetpipe.cli.entry import enter, job
from lightning_hetpipe.cli.errors import FAILED
from lightning_hetpipe.cli.program import PLAN
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning import profile_file
from lightning_hetpipe.planning.catalogue import PRECISIONS
from lightning_hetpipe.planning.cluster import Cluster, Device, Node
from lightning_hetpipe.planning.plan import Plan
from lightning_hetpipe.planning.profile import Profile
from lightning_hetpipe.planning.search import Choice, best_plan
from lightning_hetpipe.planning.units import in_bytes, seconds_of
from lightning_hetpipe.reporting.plots import draw
from lightning_hetpipe.reporting.timeline import Timeline
from lightning_hetpipe.strategy.found import found_cluster
from lightning_hetpipe.strategy.settings import count, switch

_unfit: list[Choice] = []
"""What a job found that does not fit."""


def main() -> None:
    """The console script.

    Exit codes: 0; 1 where nothing fits, or for a failure, with its traceback; 2 for a wrong setting; 130 for Ctrl-C.
    """
    _unfit.clear()
    enter(_application, PLAN)
    if _unfit:
        sys.exit(FAILED)


@hydra.main(config_path="pkg://lightning_hetpipe.conf", config_name="plan", version_base="1.3")
def _application(config: DictConfig) -> float | None:
    """One job of Hydra's; returns the minibatches per second, which sweepers may optimise; None where nothing fits."""
    return job(run, config)


def run(config: DictConfig) -> float | None:
    """Plans, prints the plan, and leaves ``plan.json`` and a picture in the run's folder.

    Returns:
        Minibatches per second, simulated; None where nothing fits, in which case no file is left.

    Raises:
        SettingError: for a setting that is unknown, missing or of the wrong kind.
    """
    _check(config)
    in_flight = count("in_flight", config.strategy.get("in_flight", "auto"))
    recompute = switch("recompute", config.strategy.get("recompute", False))
    profile = _profile(config)
    cluster, nominal = _cluster(config, profile)
    devices = [spot.device for spot in cluster.spots]
    profile = profile.with_estimates(devices, str(config.precision))
    choice = best_plan(
        profile,
        cluster,
        optimizer=config.optimizer,
        ordered=config.ordered,
        in_flight=None if in_flight == "auto" else in_flight,
        recompute=recompute,
        synchronise=_seconds(config.synchronise),
    )
    names = [layer.name for layer in profile.layers]
    plan = Plan.of(choice, profile.model, names, cluster, {*profile.estimated, *nominal})
    print(plan, *_remarks(choice, profile), sep="\n")
    if not choice.fits:
        print("\n" + "\n".join(["Nothing fits; this is the plan that lacks the least.", *_help(choice)]))
        _unfit.append(choice)
        return None
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / "plan.json")
    print(f"\nplan     {folder / 'plan.json'}\n{_picture(choice, folder)}")
    return choice.rate


def _check(config: DictConfig) -> None:
    settings.check(config, PLAN, needs=() if config.get("profile") is not None else ("model", "data", "trainer"))
    if not isinstance(config.ordered, bool):
        raise SettingError(f"ordered={config.ordered} must be true or false.")
    if config.devices == []:
        raise SettingError("devices=[] names no device; give at least one, such as devices=[RTX-3090].")
    if str(config.precision) not in PRECISIONS:
        raise SettingError(f"precision={config.precision} must be one of {', '.join(PRECISIONS)}.")
    if config.devices is not None and config.cluster is not None:
        raise SettingError(f"devices={config.devices} is given beside a cluster; leave one of them out.")
    if isinstance(config.optimizer, bool) or not isinstance(config.optimizer, str | int | float):
        raise SettingError(f"optimizer={config.optimizer} must be a name, such as adam, or a number.")
    if isinstance(config.strategy.get("stages"), int):
        raise SettingError(
            f"strategy.stages={config.strategy.stages} is what a plan says: it uses as many of the devices as are of"
            " use; leave strategy.stages out, and give fewer devices for fewer stages."
        )


def _profile(config: DictConfig) -> Profile:
    if config.profile is None:
        raise SettingError(
            "profile=null asks to measure a model, which is not available yet; give profile=FILE, with the times of its"
            " layers."
        )
    if not isinstance(config.profile, str):
        raise SettingError(f"profile={config.profile} must be the path of a file.")
    return profile_file.load(config.profile)


def _cluster(config: DictConfig, profile: Profile) -> tuple[Cluster, set[str]]:
    """The devices, and the names of those whose memory a data sheet says."""
    if config.devices is not None:
        given = config.devices if isinstance(config.devices, ListConfig) else [config.devices]
        link: Any = OmegaConf.to_container(config.link) if isinstance(config.link, DictConfig) else config.link
        cluster = Cluster([Node("here", [*map(str, given)], link)])
    elif config.cluster is None:
        cluster = found_cluster()
    else:
        cluster = built(config, "cluster", Cluster)
    measured = cluster.with_memory(profile.memory, catalogue=False)
    filled = measured.with_memory(profile.memory)
    pairs = zip(measured.spots, filled.spots, strict=True)
    return filled, {one.device.name for one, other in pairs if one.device.memory != other.device.memory}


def _seconds(value: Any) -> float:
    return seconds_of(str(value), "synchronise")


def _remarks(choice: Choice, profile: Profile) -> list[str]:
    """What the table does not say."""
    lines = [f"- {reason}" for reason in choice.reasons]
    for spot in choice.idle:
        lines.append(f"- {_named(spot.device, spot.number)} is not used: the plan is no better with it")
    for name, base in profile.estimated.items():
        lines.append(f"- the times of {name} are estimated from those of {base}, by peak FLOP/s and memory bandwidth")
    return ["", *lines] if lines else []


def _named(device: Device, number: int) -> str:
    return f"{device.name}:{number}"


def _help(choice: Choice) -> list[str]:
    """What would make it fit."""
    if (found := choice.help) is None:
        return []
    lines = []
    if found.in_flight is not None:
        lines.append(f"- strategy.in_flight={found.in_flight} fits, and no more")
    if found.recompute is not None:
        lines.append(f"- strategy.recompute=true fits, with strategy.in_flight={found.recompute} at most")
    for stage, lacking in sorted(found.lacking.items()):
        spot = choice.stages[stage].spot
        lines.append(f"- {in_bytes(lacking)} more on {_named(spot.device, spot.number)}, for stage {stage}")
    return ["Of these, each would help:", *lines] if lines else []


def _picture(choice: Choice, folder: Path) -> str:
    """Draws the simulated run; a line that says where the picture is, or why there is none."""
    timeline = Timeline.simulated(choice.simulation, [stage.times for stage in choice.stages], choice.in_flight)
    try:
        figure = draw(timeline)
    except SettingError as error:  # without matplotlib
        return f"no picture: {error}"
    figure.savefig(folder / "plan.png")
    return f"picture  {folder / 'plan.png'}"


if __name__ == "__main__":
    main()
