"""Completion of commands, keys and options in bash, zsh and fish: a script for each shell, which asks for the words."""

from __future__ import annotations

from collections.abc import Sequence
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
    if (( $#found )); then compadd -S '' -- $found; else _files; fi
}
compdef _hookline hookline""",
    "fish": """\
function __hookline_words
    set -l words (commandline -opc) (commandline -ct)
    hookline --complete "$words[2]" (commandline -ct) 2>/dev/null
end
complete -c hookline -a '(__hookline_words)'""",
}
"""What each shell reads at its start."""


def candidates(command: str, word: str, commands: Sequence[str]) -> list[str]:
    """What a word can be completed to. command: the first word behind `hookline`, which may be the one in question."""
    if command == word and "=" not in word:
        return [one for one in commands if one.startswith(word)]
    is_bare = command == "info"  # which takes a key's name alone
    command = "run" if is_bare else command
    from hookline.core.info.keys import COMMANDS, fields_as_keys, root_keys
    from hookline.core.plugin.host import PluginHost
    from hookline.core.plugin.registry import KINDS

    registry, (key, equals, _) = PluginHost.load().registry, word.partition("=")
    if equals:
        names = sorted(registry.names(key)) if key in KINDS else []
        return [f"{key}={one}" for one in names if f"{key}={one}".startswith(word)]
    if command not in COMMANDS:
        return []
    of_command = {"prompt", *(one.name for one in fields(COMMANDS[command]))}
    roots = [one for one in root_keys(has_docs=False) if one["key"] in of_command]
    keys = [one["key"] for one in (*(one for one in roots if not one["fields"]), *fields_as_keys(roots))]
    return sorted(one if is_bare else f"{one}=" for one in (*KINDS, *keys) if one.startswith(word))
