"""Counts the lines of what serves requests: core/ without the commands that measure, prepare, list or write, what only
they need, and the suites.

Run `python tools/count_lines.py`. Every line of a .py file counts, as `wc -l` counts; docs/architecture.md quotes it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

CORE = Path(__file__).resolve().parents[1] / "core"
NOT_SERVING = (
    *("report", "bench", "batch", "data", "simulate", "sweep", "info", "new", "testing"),
    *("quantize", "warm", "prebuild"),
)
"""Packages that a server could do without. Of what is counted, `serving` alone imports one, as the surface `batches`
answers rows of files, and `run`, whose `-m` starts a sweep."""


def lines_by_package(core: Path = CORE) -> dict[str, int]:
    """Lines of each package and each single module of core that serves requests, the largest first."""
    lines: Counter[str] = Counter()
    for path in core.rglob("*.py"):
        name = path.relative_to(core).parts[0]
        if name not in NOT_SERVING:
            lines[name] += path.read_text(encoding="utf-8").count("\n")
    return dict(lines.most_common())


def main() -> None:
    """Print the table."""
    lines = lines_by_package()
    for name, count in lines.items():
        print(f"{count:6,}  core/{name}")
    print(f"{sum(lines.values()):6,}  in all")


if __name__ == "__main__":
    main()
