"""Tool calls written as Python: their registration. Imports no parser."""

from __future__ import annotations

from hookline.core.contracts import Registrar, hookimpl

API_VERSION = 2


@hookimpl
def register_tool_parsers(register: Registrar) -> None:
    register("pythonic", "hookline_pythonic.parser:Pythonic", help='[f(city="Paris"), g(x=1)]: Llama 3.2, ToolACE')
