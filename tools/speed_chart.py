"""Draws docs/speed.svg, the chart of the README, from the table of throughput in docs/benchmarks.md.

Run `python tools/speed_chart.py` after changing the table; a test compares. The table is the one place of the figures.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "benchmarks.md"
CHART = ROOT / "docs" / "speed.svg"
FIRST_COLUMN = "| workload | nano-vLLM"
"""How the header of the table begins."""

WIDTH, LABELS, FULL = 820, 232, 380
"""Pixels: of the picture, of the workloads' names, and of the longest bar."""
TOP, BAR, GROUP = 78, 15, 66
"""Pixels: above the first workload, of a bar with its gap, and of a workload with its three bars."""
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .title { font-size: 16px; font-weight: 600 } .best { font-weight: 600 } .note { fill: #59636e; font-size: 12px }
  .card { fill: #ffffff; stroke: #d1d9e0 }
  .Hookline { fill: #0b6bcb } .vLLM { fill: #e0a030 } .nano-vLLM { fill: #9aa4ae }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .card { fill: #0d1117; stroke: #3d444d } .note { fill: #9198a1 }
    .Hookline { fill: #4da3ff } .vLLM { fill: #d29922 } .nano-vLLM { fill: #6e7681 }
  }"""


class Row(NamedTuple):
    """One workload: what it is, and tokens per second of each engine."""

    name: str
    load: str
    figures: dict[str, float]


def rows(text: str) -> list[Row]:
    """The workloads of the table, in its order."""
    lines = iter(text[text.index(FIRST_COLUMN) :].splitlines())
    engines = [cell.split()[0] for cell in _cells(next(lines))[1:4]]
    next(lines)  # the line below the header
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        first, *figures = _cells(line)
        name, _, load = first.partition(": ")
        numbers = [float(figure.strip("*").replace(",", "")) for figure in figures[:3]]
        found.append(Row(name.strip("`"), load, dict(zip(engines, numbers, strict=True))))
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def chart(found: list[Row]) -> str:
    """The SVG: for each workload a bar for each engine, in multiples of vLLM's throughput."""
    height = TOP + GROUP * len(found) + 8
    longest = max(figure / row.figures["vLLM"] for row in found for figure in row.figures.values())
    note = "Qwen3-0.6B's shape with random weights on one H200, 2026-11; output tokens, in prefill those of prompts"
    title = "Tokens per second; the length of a bar is the ratio to vLLM"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{title}">',
        f"<style>{STYLE}\n</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        _text(20, 30, title, "title"),
        _text(20, 52, note, "note"),
    ]
    for number, row in enumerate(found):
        lines += _group(TOP + GROUP * number, row, FULL / longest)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _group(top: int, row: Row, scale: float) -> list[str]:
    lines = [_text(20, top + 20, row.name, "best"), _text(20, top + 38, row.load, "note")]
    for place, engine in enumerate(("Hookline", "vLLM", "nano-vLLM")):
        figure, y = row.figures[engine], top + 4 + place * BAR
        width = figure / row.figures["vLLM"] * scale
        label = f"{engine} {figure:,.0f}"
        if engine == "Hookline":
            label += f" ({figure / row.figures['vLLM']:.2f}x)"
        lines.append(f'<rect class="{engine}" x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR - 2}" rx="2"/>')
        lines.append(_text(LABELS + width + 8, y + 11, label, "best" if engine == "Hookline" else "note"))
    return lines


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.0f}" y="{y:.0f}">{escape(text)}</text>'


if __name__ == "__main__":
    CHART.write_text(chart(rows(TABLE.read_text(encoding="utf-8"))), encoding="utf-8")
