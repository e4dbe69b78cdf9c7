"""A refusal in Python's words, said as the command line writes settings."""

from __future__ import annotations

import pytest
from omegaconf import DictConfig, OmegaConf

from lightning_hetpipe.cli.attribution import attributed, in_settings
from lightning_hetpipe.cli.targets import written


@pytest.fixture
def config() -> DictConfig:
    return OmegaConf.create(
        {
            "strategy": {"_target_": "lightning_hetpipe.HetPipeStrategy", "stages": 2, "cluster": "${cluster}"},
            "trainer": {"_target_": "lightning.Trainer", "strategy": "${strategy}"},
            "model": {"_target_": "lightning_hetpipe.demo.GPT", "context": "${data.context}"},
            "data": {"_target_": "lightning_hetpipe.demo.SourceText", "context": 8},
            "cluster": None,
        }
    )


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ("stages=0 must be at least 1", "strategy.stages=0 must be at least 1"),
        ("weights='fresh' is wrong; leave weights out", "strategy.weights=fresh is wrong; leave strategy.weights out"),
        ("plan=3 is wrong; leave plan out", "strategy.plan=3 is wrong; leave strategy.plan out"),
        ("timeout=None must be a number", "strategy.timeout=null must be a number"),
        ("num_nodes=2 is wrong", "trainer.num_nodes=2 is wrong"),
        ("stage_hosts['attic']='there' is not", "strategy.stage_hosts['attic']=there is not"),
        ("width=3 must be a multiple of heads=2", "model.width=3 must be a multiple of model.heads=2"),
        ("set stages to at most 3, or split a layer", "set strategy.stages to at most 3, or split a layer"),
        ("cluster is for one; leave cluster out, or", "cluster is for one; leave cluster out, or"),
        ("context=0 must be at least 1", "data.context=0 must be at least 1"),
        ("work out of place (inplace=False)", "work out of place (inplace=False)"),
        ("set automatic_optimization=True", "set automatic_optimization=True"),
        ("leave it out", "leave it out"),
        ("set data.folder to a folder", "set data.folder to a folder"),
    ],
)
def test_arguments_become_settings(config: DictConfig, refusal: str, said: str) -> None:
    assert in_settings(refusal, config) == said


def test_values_are_written_as_in_yaml() -> None:
    assert [written(value) for value in (None, True, False, 1, 0, "a", [1])] == [
        "null",
        "true",
        "false",
        "1",
        "0",
        "a",
        "[1]",
    ]


class TakesAny:
    def __init__(self, **settings: object) -> None:
        self.settings = settings


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Inner.__init__() got an unexpected keyword argument 'width'", "model.width is not a setting"),
        ("can only concatenate str (not 'int') to str", None),
    ],
)
def test_a_users_own_type_error_blames_no_setting(text: str, said: str | None, config: DictConfig) -> None:
    config.model = {"_target_": f"{__name__}.TakesAny", "width": 3}
    with pytest.raises(TypeError) as caught:
        raise TypeError(text)
    found = attributed(caught.value, config)
    assert (found is None) if said is None else str(found).startswith(said)
