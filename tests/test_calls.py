"""Names of arguments: no call has more than six arguments by position."""

from __future__ import annotations

import ast

from tests.test_imports import FILES, nodes

MOST = 6


def test_no_call_has_more_than_six_arguments_by_position() -> None:
    found = {}
    for file in FILES:
        for call in nodes(file):
            if isinstance(call, ast.Call) and sum(not isinstance(each, ast.Starred) for each in call.args) > MOST:
                found[f"{file}:{call.lineno}"] = ast.unparse(call.func)
    assert found == {}
