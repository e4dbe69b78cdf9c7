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


def test_a_value_with_an_equals_sign_is_quoted() -> None:
    """Lightning names checkpoints so, and Hydra alone could not read their paths."""
    assert settled(["ckpt_path=out/epoch=4-step=470.ckpt", "+a.b=c=d", "model.path=e=f g"]) == [
        "ckpt_path='out/epoch=4-step=470.ckpt'",
        "+a.b='c=d'",
        "++model.path='e=f g'",
    ]


def test_hydras_own_ways_to_write_an_equals_sign_are_left_to_it() -> None:
    arguments = ["ckpt_path='a=b'", 'ckpt_path="a=b"', r"ckpt_path=a\=b", "seed=choice(1,2)", "key={a: b=c}", "-a=b=c"]
    assert settled(arguments) == arguments
