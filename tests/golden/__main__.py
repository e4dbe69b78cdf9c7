"""``python -m tests.golden`` lists the places that make an error, with file and line, which no case reaches."""

from __future__ import annotations

from tests.golden.sites import PACKAGE, sites
from tests.golden.tables import without_a_case


def main() -> None:
    places = {name: position for position, name in sites().items()}
    for name in without_a_case():
        file, line, _ = places[name]
        print(f"{file.removeprefix(f'{PACKAGE.parent}/')}:{line} {name}")


if __name__ == "__main__":
    main()
