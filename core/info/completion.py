"""Completion of commands, keys and options in bash, zsh and fish: a script for each shell, which asks for the words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields

SCRIPTS = {
    "bash": """\
_hookline() {
    local words; words=("${COMP_WORDS[@]:1:COMP_CWORD}")
    local line="${COMP_LINE:0:COMP_POINT}"
    local word="${line##* }"
    COMPREPLY=($(hookline --complete "${words[0]}" "$word" 2>/dev/null))
    if [[ "$word" == *=* ]]; then COMPREPLY=("${COMPREPLY[@]#"${word%%=*}="}"); fi
    compopt -o nospace
}
complete -o default -F _hookline hookline""",
    "zsh": """\
#compdef hookline
_hookline() {
    local -a found
    found=(${(f)"$(hookline --complete "${words[2]}" "$PREFIX" 2>/dev/null)"})
    if (( $#found )); then compadd -S '' -- $found; return; fi
    compset -P '*='
    _files
}
compdef _hookline hookline""",
    "fish": """\
function __hookline_words
    set -l words (commandline -opc) (commandline -ct)
    hookline --complete "$words[2]" (commandline -ct) 2>/dev/null
end
complete -c hookline -a '(__hookline_words)'""",
}
"""For each shell, the completion script that it reads at its start."""


def candidates(command: str, word: str, commands: Sequence[str]) -> list[str]:
    """The completions of a word. command: the first word behind `hookline`; it may be the word to complete."""
    words: Iterable[str]
    if command == word and "=" not in word:
        words = commands
    elif command == "new":
        from hookline.core.new.command import kinds

        words = kinds()
    else:
        words = _words(command, word)
    return sorted(one for one in set(words) if one.startswith(word))


def _words(command: str, word: str) -> Iterator[str]:
    """The options of the word's key, or without one the command's keys; of `info`, which takes bare names, both."""
    from hookline.core.info.group_presets import GROUPS, group_presets
    from hookline.core.info.keys import COMMANDS, fields_as_keys, root_keys
    from hookline.core.plugin.host import PluginHost
    from hookline.core.plugin.registry import AUTO, CHOSEN_KINDS, KINDS

    is_bare = command == "info"
    if not is_bare and command not in COMMANDS:
        return
    host = PluginHost.load()
    of_kinds = [(one.kind, one.name) for one in (*host.registry, *host.presets) if is_bare or one.kind in KINDS]
    key, equals, _ = word.partition("=")
    if equals:
        groups = [(one["kind"], one["name"]) for one in group_presets(host)] if key in GROUPS else []
        chosen = [(kind, AUTO) for kind in CHOSEN_KINDS]
        yield from (f"{key}={name}" for kind, name in (*of_kinds, *groups, *chosen) if kind == key)
        return
    if is_bare:
        yield from (name for _, name in of_kinds)
    keys = {"prompt", *(one.name for one in fields(COMMANDS["run" if is_bare else command]))}
    roots = [one for one in root_keys(has_docs=False) if one["key"] in keys]
    of_options = [(one.kind, field.name) for one in host.registry if one.config for field in fields(one.config)]
    inner = [f"{kind}.{name}" for kind, name in of_options if kind in KINDS and word.startswith(f"{kind}.")]
    full = [one["key"] for one in (*(one for one in roots if not one["fields"]), *fields_as_keys(roots))]
    yield from (one if is_bare else f"{one}=" for one in (*KINDS, "experiment", *inner, *full))
