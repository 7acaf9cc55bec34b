"""Which files of core name a feature: a search for words in the names and strings of its code.

Run `python tools/feature_files.py [--files]`; --files lists the files. Comments, docstrings and the names of imported
modules do not count; commands that no server imports do not either (tools/count_lines.py names them). The step's
packages are what plans, sends, computes and commits a step. docs/architecture.md quotes the figures.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

from tools.count_lines import CORE, NOT_SERVING

FEATURES = {
    "scores": r"logprobs?(?![a-z])|scor(e|es|ed|ing|ers?)(?![a-z])",
    "masks": r"(un)?mask(s|ed|ing)?(?![a-z])|grammars?|structured|constraints?",
    "processors": r"processors?(?![a-z])",
    "pooling": r"pool(ing|ed|ers?)(?![a-z])",
    "taps": r"(?<![a-z])tap(s|ped|ping)?(?![a-z])",
    "drafts": r"draft(s|ed|ers?|ing)?(?![a-z])|speculat(e|ed|es|ing|ion|ive)(?![a-z])",
}
"""What a name or a string of each feature has in it, whatever its case."""
NOT_OF_IT = (
    r"(output|multi|pre|post)_processor\w*|scores_NR?\b|best_score\w*|masked_fill_?|is_mask"
    r"|(plan|step)_draft|(?m:^draft$)"
)
"""What sounds alike: scores are also what ranks draw by, masks what torch fills, and drafts what plans and steps are
before they are whole."""
OWN = {"drafts": ("contracts/", "speculation/", "assembly/speculation.py")}
"""Where a feature is at home, if it has a place of its own: its contract and itself, whole."""
STEP = ("step", "requests", "engine", "kv_cache", "executor", "worker")


def words_of(source: str) -> str:
    """The names and strings of a module's code, one a line, as words that end where a capital or `_` begins one."""
    tree = ast.parse(source)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    modules = {id(one) for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names}
    found: set[str] = set()
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "asname"):
            if isinstance(value := getattr(node, field, None), str) and id(node) not in modules:
                found.add(value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            found.add(node.value)
    return re.sub(NOT_OF_IT, " ", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", "\n".join(sorted(found))), flags=re.IGNORECASE)


def in_step(files: list[str]) -> list[str]:
    """Those of these files that are in the step's packages."""
    return [name for name in files if name.split("/")[0] in STEP]


def beyond_own(feature: str, files: list[str]) -> list[str]:
    """Those of these files that are outside of the feature's own place."""
    return [name for name in files if not name.startswith(OWN.get(feature, ()))]


@cache
def files_by_feature(core: Path = CORE) -> dict[str, list[str]]:
    """The files of core that serves requests and names each feature."""
    files: dict[str, list[str]] = {feature: [] for feature in FEATURES}
    for path in sorted(core.rglob("*.py")):
        name = path.relative_to(core)
        if name.parts[0] not in NOT_SERVING:
            words = words_of(path.read_text(encoding="utf-8"))
            for feature, pattern in FEATURES.items():
                if re.search(pattern, words, flags=re.IGNORECASE):
                    files[feature].append(str(name))
    return files


if __name__ == "__main__":
    for feature, named in files_by_feature().items():
        print(f"{feature:10} {len(named):3} files of core, {len(in_step(named)):2} of them in the step's packages")
        if "--files" in sys.argv:
            print("\n".join(f"    {name}" for name in named))
