"""The metrics of several engines as one text in Prometheus' format: each sample says which replica it is of."""

from __future__ import annotations

from collections.abc import Mapping


def merged(texts: Mapping[int, str]) -> str:
    """One text of those of several replicas, by their numbers. A family's help and type are said once."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        family, is_new = "", True
        for line in filter(None, text.splitlines()):
            if not line.startswith("#"):
                samples.setdefault(family, []).append(_labelled(line, replica))
                continue
            mark, _, rest = line[1:].strip().partition(" ")
            if mark not in ("HELP", "TYPE"):
                continue
            name = rest.partition(" ")[0]
            if name != family:
                family, is_new = name, name not in heads
            if is_new:
                heads.setdefault(name, []).append(line)
    lines = [line for name in samples for line in (*heads.get(name, ()), *samples[name])]
    return "".join(f"{line}\n" for line in lines)


def _labelled(line: str, replica: int) -> str:
    """A sample with one label more. Only values of labels may hold braces or spaces, and they come behind the name."""
    name = line[: min(at for at in (line.find("{"), line.find(" ")) if at >= 0)]
    rest = line[len(name) :]
    label = f'replica="{replica}"'
    if rest.startswith("{"):
        comma = "" if rest[1:].lstrip().startswith("}") else ","
        return f"{name}{{{label}{comma}{rest[1:]}"
    return f"{name}{{{label}}}{rest}"
