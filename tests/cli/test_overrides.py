import pytest

from lightning_hetpipe.cli.composition import planned, settled


def test_settings_may_be_overridden_or_added_alike() -> None:
    assert settled(["strategy.in_flight=6", "callbacks.model_checkpoint.mode=min"]) == [
        "++strategy.in_flight=6",
        "++callbacks.model_checkpoint.mode=min",
    ]


def test_the_rest_is_left_to_hydra() -> None:
    arguments = [
        "--config-dir",
        "a.b/mine",
        "-m",
        "experiment=gpt",
        "seed=3",
        "hydra.run.dir=there",
        "+strategy.weights=stash",
        "++strategy.stages=2",
        "~callbacks.progress_bar",
        "experiment@there=gpt",
    ]
    assert settled(arguments) == arguments


def test_overrides_may_stand_on_both_sides_of_an_option() -> None:
    """Hydra alone takes them in one row only."""
    assert settled(["seed=3", "~model.width", "--config-dir", "a=b", "-m", "--cfg=job", "data=digits"]) == [
        "--config-dir",
        "a=b",
        "-m",
        "--cfg=job",
        "seed=3",
        "~model.width",
        "data=digits",
    ]


def test_a_value_with_an_equals_sign_is_quoted() -> None:
    """Lightning names checkpoints so, and Hydra alone could not read their paths."""
    assert settled(["ckpt_path=out/epoch=4-step=470.ckpt", "+a.b=c=d", "model.path=e=f g"]) == [
        "ckpt_path='out/epoch=4-step=470.ckpt'",
        "+a.b='c=d'",
        "++model.path='e=f g'",
    ]


def test_hydras_own_ways_to_write_an_equals_sign_are_left_to_it() -> None:
    arguments = ["ckpt_path='a=b'", 'ckpt_path="a=b"', r"ckpt_path=a\=b", "seed=choice(1,2)", "key={a: b=c}"]
    assert settled(arguments) == arguments


@pytest.mark.parametrize(
    "plan", ["strategy.plan=plan.json", "+strategy.plan=plan.json", "++strategy.plan=a.json,b.json"]
)
def test_a_plan_holds_instead_of_an_experiments_own_stages(plan: str) -> None:
    assert planned(["-m", plan]) == ["-m", plan, "strategy.stages=auto", "strategy.in_flight=auto"]


def test_stages_beside_a_plan_are_left_for_the_strategy_to_refuse() -> None:
    given = ["strategy.plan=plan.json", "strategy.stages=2"]
    assert planned(given) == [*given, "strategy.in_flight=auto"]
    given = ["strategy.plan=plan.json", "++strategy.stages=2", "+strategy.in_flight=3"]
    assert planned(given) == given


def test_devices_are_planned_for_at_an_experiments_own_number_in_flight() -> None:
    assert planned(["cluster=mixed_box"]) == ["cluster=mixed_box", "strategy.stages=auto"]
    assert planned(["cluster=mixed_box", "strategy.stages=2"]) == ["cluster=mixed_box", "strategy.stages=2"]
    both = ["cluster=mixed_box", "strategy.plan=plan.json"]
    assert planned(both) == [*both, "strategy.stages=auto", "strategy.in_flight=auto"]


@pytest.mark.parametrize(
    "plan",
    [
        [],
        ["cluster=default"],
        ["cluster.link=1 GB/s"],
        ["strategy.plan=null"],
        ["++strategy.plan=null"],
        ["strategy.planned=1"],
    ],
)
def test_without_a_plan_an_experiments_own_stages_hold(plan: list[str]) -> None:
    assert planned(plan) == plan
