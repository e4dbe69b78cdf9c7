"""Hooks of the site: Sphinx's roles in docstrings, such as :func:`draw`, are shown as the code that they name."""

import re


def on_page_content(html: str, **_: object) -> str:
    return re.sub(r":(?:func|class|data|meth|attr|mod):(?=<(?:code|a|autoref))", "", html)
