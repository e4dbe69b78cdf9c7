"""Tables of docs/settings.md, from the declarations and docstrings of settings; ``python -m`` writes them there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from lightning_hetpipe import HetPipeStrategy, WSPCallback
from lightning_hetpipe.settings import Duration, declared, seconds, words

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
OWNERS = (HetPipeStrategy, WSPCallback)
HEAD = "| argument | default | must be | meaning |\n| --- | --- | --- | --- |\n"
TABLE = re.compile(rf"^{re.escape(HEAD)}(?:\|.*\n)*", re.MULTILINE)


def meanings(owner: type) -> dict[str, str]:
    """Return what the docstring of ``owner`` says of each argument, in one line."""
    text = (inspect.getdoc(owner) or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+(?:, \w+)*): (.*(?:\n        .*)*)", text, re.MULTILINE)
    return {name: " ".join(entry.split()) for names, entry in entries for name in names.split(", ")}


def linked(text: str) -> str:
    """Make links of pages that ``text`` names as (docs/page.md)."""
    text = re.sub(r"docs/([\w-]+)\.md#([\w-]+)", lambda match: _link(match[2], f"{match[1]}.md#{match[2]}"), text)
    text = re.sub(r"docs/([\w-]+)\.md", lambda match: _link(match[1], f"{match[1]}.md"), text)
    return text.replace("``", "`")


def _link(name: str, target: str) -> str:
    return f"[{name.replace('-', ' ')}]({target})"


def default(value: Any, hint: Any) -> str:
    if hint == Duration:
        total = seconds(value)
        return f"{total:g} s" if total < 60 else f"{total / 60:g} min"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def table(owner: type) -> str:
    own, said = declared(owner), meanings(owner)
    ours = [name for name in own.parameters if not said[name].startswith("As ``ParallelStrategy``")]
    rows = [(name, own.parameters[name].default, own.hints[name], linked(said[name])) for name in ours]
    return HEAD + "".join(
        f"| `{name}` | {default(value, hint)} | {words(hint)} | {meaning} |\n" for name, value, hint, meaning in rows
    )


def main() -> None:
    owners = iter(OWNERS)
    PAGE.write_text(TABLE.sub(lambda _: table(next(owners)), PAGE.read_text()))


if __name__ == "__main__":
    main()
