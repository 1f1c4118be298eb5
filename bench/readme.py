"""Write the tables of README.md and bench/README.md again from the files in bench/results.

    python bench/readme.py            # rewrite
    python bench/readme.py --check    # or only say whether they are what the files give

A table stands between ``<!-- bench:NAME:begin -->`` and ``<!-- bench:NAME:end -->``; NAME is one of
``KNOWN``. Nothing else in the files is touched, and no figure is typed by hand.
"""

import argparse
import re
from pathlib import Path

from goals import goals
from history import HISTORY
from tables import TABLES, Files

from layerskip.files import write_text

REPO = Path(__file__).parents[1]
PAGES = (REPO / "README.md", REPO / "bench" / "README.md")
KNOWN = {**TABLES, **HISTORY, "goals": goals}
MARKED = re.compile(r"(<!-- bench:([a-z-]+):begin -->\n).*?(<!-- bench:\2:end -->)", re.DOTALL)


def rewritten(text: str, files: Files) -> str:
    """The text with what the files give between its markers.

    Raises:
        SystemExit: a marker has no end or another name, or its file is not there.
    """
    names = re.findall(r"<!-- bench:([a-z-]+):begin -->", text)
    if sorted(names) != sorted(m[1] for m in MARKED.findall(text)):
        raise SystemExit("a bench marker of the README has no end, or the end of another one")
    unknown = [n for n in names if n not in KNOWN]
    if unknown:
        raise SystemExit(f"no table is called {unknown[0]!r}; there are {', '.join(KNOWN)}")
    return MARKED.sub(lambda m: m[1] + KNOWN[m[2]](files) + m[3], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--readme", type=Path, nargs="+", default=PAGES)
    parser.add_argument("--results", type=Path, default=REPO / "bench" / "results")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it differs")
    options = parser.parse_args()
    files = Files(options.results)
    for page in options.readme:
        text = page.read_text(encoding="utf-8")
        new = rewritten(text, files)
        if options.check and new != text:
            raise SystemExit(f"{page} is not what {options.results} gives")
        if not options.check:
            write_text(page, new)


if __name__ == "__main__":
    main()
