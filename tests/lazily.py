"""Names of modules that take seconds to import, which collecting the tests of others should not wait for."""

from functools import cached_property
from importlib import import_module
from typing import Any


class Lazily:
    """What stands under a name of a module; imported when something is asked of it."""

    def __init__(self, module: str, name: str) -> None:
        self._place = module, name

    @cached_property
    def _found(self) -> Any:
        module, name = self._place
        return getattr(import_module(module), name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):  # pytest looks at whatever a module holds
            raise AttributeError(name)
        return getattr(self._found, name)

    def __getitem__(self, key: Any) -> Any:
        return self._found[key]

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._found(*arguments, **options)
