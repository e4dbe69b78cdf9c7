"""All tables of the golden table."""

from __future__ import annotations

from tests.golden import commands, documents, launch_and_servers, relations, strategy_settings, training
from tests.golden.cases import told
from tests.golden.elsewhere import ELSEWHERE, NOWHERE
from tests.golden.sites import sites

CASES = [
    *strategy_settings.CASES,
    *documents.CASES,
    *launch_and_servers.CASES,
    *commands.CASES,
    *relations.CASES,
    *training.CASES,
]
ALIKE = commands.ALIKE
"""Cases that reach no place which others do not: with ``make test-all`` only."""

LIGHTNINGS = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
"""Arguments that Lightning checks."""


def listed() -> set[str]:
    """Return the places that no case has to reach."""
    return {name for names in ELSEWHERE.values() for name in names} | {*NOWHERE}


def reached() -> set[str]:
    """Run all cases; return the places that they reach."""
    return {site for case in CASES for site in told(case).sites}


def without_a_case() -> list[str]:
    """Run all cases; return the places that neither a case nor a test of ``ELSEWHERE`` reaches."""
    return sorted({*sites().values()} - reached() - listed())
