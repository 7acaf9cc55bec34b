"""A process whose versions or plugins differ from the driver's is named by its node, in one line."""

import re

import pytest

from hookline.core.errors import ConfigError
from hookline.core.plugin.environment import check_here, environment


@pytest.mark.parametrize(
    ("name", "drivers", "message"),
    [
        ("hookline", "9.9.9", r"hookline is \S+ there and 9\.9\.9 here; make it the same on every node"),
        ("HOOKLINE_PLUGINS", "x", "HOOKLINE_PLUGINS is .+ there and x here; make it the same on every node"),
        ("plugins", ["plugin y"], "its plugins are without plugin y and with .+; install the same on every node"),
    ],
)
def test_a_node_that_differs_from_the_driver_is_named_with_what_differs(name, drivers, message):
    with pytest.raises(ConfigError) as found:
        check_here({name: drivers}, "10.0.0.2")
    assert re.fullmatch(f"node 10\\.0\\.0\\.2 has another environment than the driver: {message}", str(found.value))


def test_a_node_like_the_drivers_is_taken():
    check_here(environment(), "10.0.0.2")
