"""A plugin for tests: a logits processor that does not take 13, and breaks in a draw of 14.

A plugin like any other: HOOKLINE_PLUGINS=tests.picky_processor.
"""

from dataclasses import dataclass

from hookline.core.contracts import LogitsProcessor, hookimpl

API_VERSION = 2


@dataclass
class Config:
    value: int = 0


class Picky(LogitsProcessor):
    def __init__(self, spec):
        pass

    @staticmethod
    def encode(arguments, request):
        return [arguments.value]

    def load(self, row, values_X):
        if len(values_X) and int(values_X[0]) == 13:
            raise ValueError("not 13")

    def process(self, logits_NV, rows):
        if int(rows.columns["value"].max()) == 14:
            raise ValueError("not 14 either")
        return logits_NV


@hookimpl
def register_processors(register):
    register("picky", "tests.picky_processor:Picky", config=Config)
