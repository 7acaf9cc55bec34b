"""The configuration that further ranks read is the one of the engine's process."""

from hookline.core.assembly.config_tree import config_tree
from hookline.core.config.settings import validate
from hookline.core.plugin.host import PluginHost


def test_another_process_reads_the_same_configuration_with_the_processors_defaults():
    host = PluginHost.load()
    tree = {
        "tp": 2,
        "engine": {"prepared_sampling": [{"logprobs": 3}], "max_num_seqs": 9},
        "processors": {"mirostat": {"tau": 3.0}},
    }
    config = validate(tree, host)
    again = validate(config_tree(config, config.kernels.name), host)
    assert again == config and again.processors["mirostat"].arguments.tau == 3.0
