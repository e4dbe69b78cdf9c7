"""hetpipe-plan: which layers to run on which device, how many minibatches in flight, and what to expect of it."""

from __future__ import annotations

import re
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import hydra
import lightning as L
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from tqdm import tqdm

from lightning_hetpipe.cli import settings
from lightning_hetpipe.cli.building import built
from lightning_hetpipe.cli.entry import enter, job
from lightning_hetpipe.cli.errors import FAILED
from lightning_hetpipe.cli.program import PLAN
from lightning_hetpipe.errors import SettingError, nearest
from lightning_hetpipe.planning import profile_file
from lightning_hetpipe.planning.catalogue import PRECISIONS, gpus, known
from lightning_hetpipe.planning.cluster import Cluster, Device, Node
from lightning_hetpipe.planning.plan import Plan
from lightning_hetpipe.planning.profile import Profile
from lightning_hetpipe.planning.profile_cache import ProfileCache
from lightning_hetpipe.planning.search import Choice, best_plan
from lightning_hetpipe.planning.units import in_bytes, seconds_of
from lightning_hetpipe.reporting.plots import draw
from lightning_hetpipe.reporting.timeline import Timeline
from lightning_hetpipe.strategy.found import found_cluster
from lightning_hetpipe.strategy.profiler import ProfilingStrategy, Progress
from lightning_hetpipe.strategy.profiler import profile as profile_model
from lightning_hetpipe.strategy.settings import count, switch

_QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "barebones": False,
    "fast_dev_run": False,
}
"""What the Trainer does besides training, which measuring layers needs nothing of."""

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
    measured, optimizer = _profile(config)
    cluster, nominal = _cluster(config, measured)
    devices = [spot.device for spot in cluster.spots]
    profile = measured.with_estimates(devices, str(config.precision))
    choice = best_plan(
        profile,
        cluster,
        optimizer=optimizer,
        ordered=config.ordered,
        in_flight=None if in_flight == "auto" else in_flight,
        recompute=recompute,
        synchronise=_seconds(config.synchronise),
    )
    names = [layer.name for layer in profile.layers]
    guessed = {device.name for device in devices if profile.name_of(device) in profile.estimated}
    plan = Plan.of(choice, profile.model, names, cluster, guessed | nominal)
    print(plan, *_remarks(choice, profile), sep="\n")
    if not choice.fits:
        print("\n" + "\n".join(["Nothing fits; this is the plan that lacks the least.", *_help(choice)]))
        _unfit.append(choice)
        return None
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / "plan.json")
    print(f"\nplan     {folder / 'plan.json'}\n{_picture(choice, folder)}")
    if config.profile is None:
        profile_file.save(measured, folder / "profile.json")
        print(f"profile  {folder / 'profile.json'}")
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
    if any(re.match(r"\+*strategy\.stages=", each) for each in HydraConfig.get().overrides.task):
        raise SettingError(  # an experiment's are those that it has without a plan
            f"strategy.stages={config.strategy.stages} is what a plan says: it uses as many of the devices as are of"
            " use; leave strategy.stages out, and give fewer devices for fewer stages."
        )


def _profile(config: DictConfig) -> tuple[Profile, str | float]:
    """The profile of the file, or of the model; and the optimizer, whose state takes memory, too."""
    asked: str | float = config.optimizer
    if config.profile is not None:
        if not isinstance(config.profile, str):
            raise SettingError(f"profile={config.profile} must be the path of a file.")
        return profile_file.load(config.profile), "adam" if asked == "auto" else asked
    profile, own = _measured(config)
    if asked == "auto" and own is None:
        raise SettingError(
            "optimizer=auto: what state the model's optimizer keeps is not known; give optimizer=N, the bytes of it for"
            " each byte of the weights."
        )
    return profile, asked if own is None or asked != "auto" else own


def _measured(config: DictConfig) -> tuple[Profile, str | None]:
    """Runs the model's first minibatch as hetpipe-train would, and measures the layers."""
    config = deepcopy(config)
    if config.get("seed") is not None:
        L.seed_everything(config.seed, workers=True, verbose=False)
    kept = {key: config.strategy[key] for key in ("module", "timeout") if key in config.strategy}
    with open_dict(config):
        config.trainer.pop("callbacks", None)
        config.trainer.update(_QUIET)
        config.trainer.pop("strategy", None)
    strategy = ProfilingStrategy(ProfileCache(), _progress(), **kept)
    model = built(config, "model", L.LightningModule)
    data = built(config, "data", L.LightningDataModule)
    trainer = built(config, "trainer", L.Trainer, strategy=strategy)
    return profile_model(trainer, model, datamodule=data)


def _progress() -> Progress:
    bar: tqdm[Any] = tqdm(unit="layer", leave=False, disable=None, file=sys.stderr)

    def show(device: str, done: int, of: int) -> None:
        bar.set_description(f"measuring on {device}", refresh=False)
        bar.total, bar.n = of, done
        bar.refresh()
        if done == of:
            bar.close()

    return show


def _cluster(config: DictConfig, profile: Profile) -> tuple[Cluster, set[str]]:
    """The devices, and the names of those whose memory a data sheet says."""
    if config.devices is not None:
        given = config.devices if isinstance(config.devices, ListConfig) else [config.devices]
        link: Any = OmegaConf.to_container(config.link) if isinstance(config.link, DictConfig) else config.link
        cluster = Cluster([Node("here", [*map(str, given)], link)])
        for name in {spot.device.name: spot for spot in cluster.spots if profile.name_of(spot.device) is None}:
            if known(name) is None:
                names = {*profile.times, *gpus()}
                raise SettingError(
                    f"devices=[{name}] is neither in the profile, which has {', '.join(sorted(profile.times))}, nor in"
                    f" the catalogue of GPUs{nearest(name, names)}"
                )
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
    for base in dict.fromkeys(profile.estimated.values()):
        names = ", ".join(name for name, other in profile.estimated.items() if other == base)
        lines.append(f"- the times of {names} are estimated from those of {base}, by peak FLOP/s and memory bandwidth")
        if known(base) is None:
            lines.append(f"- {base} stands for the fastest of them: their ratios are estimates, seconds are of {base}")
    return ["", *lines] if lines else []


def _named(device: Device, number: int) -> str:
    return f"{device.name}:{number}"


def _help(choice: Choice) -> list[str]:
    """What would make it fit."""
    if (found := choice.help) is None:
        return []
    lines = []
    if found.in_flight is not None:
        lines.append(f"- strategy.in_flight={found.in_flight}, or fewer")
    if found.recompute is not None:
        lines.append(f"- strategy.recompute=true, with strategy.in_flight={found.recompute} or fewer")
    if found.lacking:
        spots = {stage: choice.stages[stage].spot for stage in sorted(found.lacking)}
        more = [f"{in_bytes(found.lacking[n])} on {_named(spot.device, spot.number)}" for n, spot in spots.items()]
        lines.append(f"- more memory: {' and '.join(more)}")
    return ["It would fit with", *lines] if lines else []


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
