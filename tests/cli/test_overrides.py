from lightning_hetpipe.cli.overrides import settled


def test_settings_may_be_overridden_or_added_alike() -> None:
    assert settled(["strategy.in_flight=6", "trainer.callbacks.checkpoint.mode=min"]) == [
        "++strategy.in_flight=6",
        "++trainer.callbacks.checkpoint.mode=min",
    ]


def test_the_rest_is_left_to_hydra() -> None:
    arguments = [
        "experiment=gpt",
        "seed=3",
        "hydra.run.dir=there",
        "+strategy.weights=stash",
        "++strategy.stages=2",
        "~trainer.callbacks.progress",
        "--config-dir",
        "a.b/mine",
        "-m",
        "experiment@there=gpt",
    ]
    assert settled(arguments) == arguments
