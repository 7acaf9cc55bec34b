"""What arguments of the Ray Serve application become: a command line, and what Ray is told. No cluster."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from hookline.core.config.compose import compose
from hookline.core.errors import ConfigError
from hookline.core.plugin.host import PluginHost
from hookline.core.serve.ray.options import (
    CLOSE_S,
    NOT_OURS,
    STICKY_ROUTER,
    RayOptions,
    deployment_options,
    gpus_of,
    split_arguments,
)
from hookline.core.serve.settings import ServeConfig, ServeKeys, validate_serve

HOST = functools.cache(PluginHost.load)


def told(tree: dict[str, Any], **options: Any) -> dict[str, Any]:
    """What Ray is told of an application with this configuration."""
    run = validate_serve(tree, HOST())
    return deployment_options(RayOptions(**options), run.config, run.serve, 0)


def test_arguments_are_a_command_line_and_ray_s_are_apart() -> None:
    given = {"model": "qwen3", "engine.max_num_seqs": "64", "ray.max_replicas": "4", "ray": {"sticky": False}}
    assert split_arguments(given) == (
        ["model=qwen3", "engine.max_num_seqs=64"],
        RayOptions(max_replicas=4, sticky=False),
    )


def test_values_of_a_serve_config_may_be_nested_and_typed() -> None:
    given = {"engine": {"max_num_seqs": 64, "overlap": None}, "serve": {"names": ["a", "b"]}, "ray": {"num_gpus": 0.5}}
    arguments, options = split_arguments(given)
    assert arguments == ["engine.max_num_seqs=64", "engine.overlap=null", 'serve.names=["a", "b"]']
    assert options.num_gpus == 0.5
    run = validate_serve(compose(arguments, HOST(), ServeKeys, "serve")[0].tree, HOST())
    assert (run.config.engine.max_num_seqs, run.serve.names) == (64, ("a", "b"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"serve.port": "1"}, "serve.port has no effect under Ray Serve: use http_options"),
        ({"serve": {"replicas": 2}}, "use ray.min_replicas and ray.max_replicas"),
        ({"ray.max_replica": "2"}, "ray.max_replica"),
        ({"ray.min_replicas": "many"}, "ray.min_replicas"),
        ({"ray.min_replicas": "3", "ray.max_replicas": "2"}, "is less than ray.min_replicas=3"),
        ({"ray.min_replicas": "0"}, "there is never a replica"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        split_arguments(given)
    assert "\n" not in str(raised.value)


LEAST: dict[str, float] = {
    "min_replicas": 0,
    "max_replicas": 1,
    "target_ongoing_requests": 0.1,
    "max_ongoing_requests": 1,
    "upscale_delay_s": 0.0,
    "downscale_delay_s": 0.0,
    "look_back_s": 10.1,
    "num_cpus": 0.0,
    "num_gpus": 0.0,
}
"""Of each number that has a range, about the least that it may be."""


@pytest.mark.parametrize("key", LEAST)
def test_a_number_out_of_its_range_is_refused_by_its_key(key: str) -> None:
    least, others = LEAST[key], {"max_replicas": 1} if key == "min_replicas" else {}
    assert getattr(split_arguments({"ray": {**others, key: least}})[1], key) == least
    with pytest.raises(ConfigError, match=rf"^ray\.{key}="):
        split_arguments({"ray": {**others, key: least - (1 if isinstance(least, int) else 0.1)}})


def test_an_unscaled_number_of_replicas_may_be_given_twice_and_a_text_is_not_spelt_again() -> None:
    given = {"ray.min_replicas": 2, "ray.max_replicas": 2, "serve.names": '["a"]', "ray.name": "mine"}
    arguments, options = split_arguments(given)
    assert arguments == ['serve.names=["a"]']
    assert (options.min_replicas, options.max_replicas, options.name) == (2, 2, "mine")
    assert split_arguments({"ray.max_replicas": "null", "ray.sticky": "false"})[1] == RayOptions(sticky=False)
    assert told({}, min_replicas=2, max_replicas=2)["num_replicas"] == 2


def test_keys_that_are_ray_s_are_keys_of_the_server() -> None:
    assert set(NOT_OURS) <= set(vars(ServeConfig()))


def test_what_ray_is_told_follows_from_the_engine_s_sizes() -> None:
    found = told({"engine": {"max_num_seqs": 64}, "serve": {"drain_s": 20}}, max_replicas=3)
    assert found["max_ongoing_requests"] == 128
    assert found["autoscaling_config"]["target_ongoing_requests"] == 64
    assert (found["autoscaling_config"]["min_replicas"], found["autoscaling_config"]["max_replicas"]) == (1, 3)
    assert found["graceful_shutdown_timeout_s"] == 20 + CLOSE_S
    assert found["request_router_config"] == {"request_router_class": STICKY_ROUTER}


def test_by_default_ray_is_told_this() -> None:
    assert told({"engine": {"max_num_seqs": 32}, "serve": {"drain_s": 20, "max_requests": 99}}, max_replicas=2) == {
        "name": "hookline",
        "max_ongoing_requests": 64,
        "max_queued_requests": 99,
        "backpressure_config": {"status_code": 429, "retry_after_s": 1},
        "ray_actor_options": {"num_cpus": 1.0, "num_gpus": 0},
        "graceful_shutdown_timeout_s": 30.0,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 3,
        "request_router_config": {"request_router_class": STICKY_ROUTER},
        "autoscaling_config": {
            "min_replicas": 1,
            "max_replicas": 2,
            "target_ongoing_requests": 32.0,
            "upscale_delay_s": 10.0,
            "downscale_delay_s": 300.0,
            "look_back_period_s": 30.0,
        },
    }


def test_what_ray_is_told_can_be_said_otherwise() -> None:
    found = told({}, max_replicas=2, target_ongoing_requests=3.5, max_ongoing_requests=7, num_cpus=2.0)
    assert (found["max_ongoing_requests"], found["ray_actor_options"]["num_cpus"]) == (7, 2.0)
    assert found["autoscaling_config"]["target_ongoing_requests"] == 3.5


def test_without_a_maximum_nothing_is_scaled_and_stickiness_can_be_left_out() -> None:
    found = told({}, min_replicas=2, sticky=False)
    assert found["num_replicas"] == 2
    assert not {"autoscaling_config", "request_router_config"} & set(found)


@pytest.mark.parametrize(
    ("tree", "options", "in_cluster", "expected"),
    [
        ({"tp": 2}, {}, 4, 2),
        ({"tp": 2}, {}, 0, 0),
        ({"device": "cuda"}, {}, 0, 1),
        ({"device": "cuda"}, {"num_gpus": 0.0}, 4, 0),
        ({"device": "cpu"}, {}, 4, 0),
        ({}, {"num_gpus": 0.5}, 0, 0.5),
    ],
)
def test_a_replica_has_a_gpu_for_each_rank_where_there_are_any(
    tree: dict[str, Any], options: dict[str, Any], in_cluster: int, expected: float
) -> None:
    assert gpus_of(RayOptions(**options), validate_serve(tree, HOST()).config, in_cluster) == expected
