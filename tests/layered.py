"""A plugin for tests: a model whose layers keep what its config says. HOOKLINE_PLUGINS=tests.layered."""

from dataclasses import dataclass

from hookline.core.contracts import ModelConfig, hookimpl

API_VERSION = 2


@dataclass
class LayeredConfig(ModelConfig):
    """Nothing of its own."""


@hookimpl
def register_models(register):
    register("layered", "tests.layered_model:LayeredModel", config=LayeredConfig, help="layers of all kinds")
