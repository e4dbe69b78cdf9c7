"""Every error sentence names its setting, its value and the way out, and every place that makes an error has a case."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from lightning_hetpipe import HetPipeStrategy, WSPCallback
from lightning_hetpipe.cli.start_up import WRONG_SETTING
from tests.golden import tables
from tests.golden.cases import Case, is_one_sentence, public, told
from tests.golden.elsewhere import ELSEWHERE
from tests.golden.sites import sites

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "case",
    [
        *[pytest.param(each, id=each.name) for each in tables.CASES],
        *[pytest.param(each, id=each.name, marks=pytest.mark.slow) for each in tables.ALIKE],
    ],
)
def test_a_sentence_names_the_setting_its_value_and_the_way_out(case: Case) -> None:
    found = told(case)
    assert public(found.error) is case.error, f"{type(found.error).__name__}: {found.sentence}"
    if isinstance(found.error, SystemExit):
        assert found.error.code == WRONG_SETTING, found.sentence
    assert is_one_sentence(found.sentence) or not case.is_ours, found.sentence
    assert not case.missing(found.sentence), f"{case.missing(found.sentence)} not named by: {found.sentence}"


def test_every_place_that_makes_an_error_has_a_case() -> None:
    """``python -m tests.golden`` lists the places without one."""
    assert not (left := tables.without_a_case()), f"without a case: {', '.join(left)}"
    gone = tables.listed() - {*sites().values()}
    assert not gone, f"elsewhere.py names places that are not there: {', '.join(sorted(gone))}"
    both = tables.listed() & tables.reached()
    assert not both, f"elsewhere.py names places that a case reaches: {', '.join(sorted(both))}"


@pytest.mark.parametrize("test", ELSEWHERE)
def test_the_tests_elsewhere_are_there(test: str) -> None:
    file, function = test.split("::")
    assert re.search(rf"^def {function}\(", (TESTS / file).read_text(), re.MULTILINE), test


@pytest.mark.parametrize("owner", [HetPipeStrategy, WSPCallback])
def test_every_setting_has_a_case(owner: type) -> None:
    settings = set(inspect.signature(owner).parameters) - tables.LIGHTNINGS
    named = {case.setting.partition("[")[0] for case in tables.CASES}
    assert settings <= named, settings - named
