"""The configuration survives the way to a child, and contradictions are refused with the values that disagree."""

import json

import pytest

from common.config import (
    CacheOptions,
    EngineConfig,
    ModelOptions,
    SchedulerOptions,
    ServerOptions,
    is_loopback,
    parse_count,
    step_limits,
)
from common.errors import ConfigError


def test_a_configuration_comes_back_equal():
    config = EngineConfig(
        model=ModelOptions(model="x", served_model_name=("a", "b")),
        server=ServerOptions(api_key=("k",)),
        run_dir="/run",
    )
    assert EngineConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("values", [{"modle": {}}, {"model": {"modl": "x"}}])
def test_unknown_keys_are_refused(values):
    with pytest.raises(ConfigError, match="unknown configuration key 'mod"):
        EngineConfig.from_json(json.dumps(values))


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("8k", 8000), ("8Ki", 8192), ("2GiB", 2**31), ("1.5k", 1500), (" 3 ", 3), ("2mb", 2 * 10**6)],
)
def test_counts_are_read_as_people_write_them(text, value):
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "8kk", "0x10", "1e3", "nan"])
def test_other_counts_are_refused(text):
    with pytest.raises(ConfigError, match="wanted a whole number"):
        parse_count(text)


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ({"cache": CacheOptions(block_size=0)}, "--block-size is 0"),
        ({"cache": CacheOptions(block_size=24)}, "--block-size is 24"),
        ({"cache": CacheOptions(gpu_memory_utilization=1.5)}, "is 1.5"),
        ({"scheduler": SchedulerOptions(run_ahead=3)}, "--run-ahead is 3"),
        ({"scheduler": SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=4)}, "is 4, less than .* is 8"),
        ({"scheduler": SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=8)}, "is 8, less than .* is 16"),
        ({"scheduler": SchedulerOptions(preemption="swap")}, "swap-space-bytes is 0"),
        ({"scheduler": SchedulerOptions(target_itl_ms=-1.0)}, "--target-itl-ms is -1"),
        ({"scheduler": SchedulerOptions(target_itl_ms=float("nan"))}, "--target-itl-ms is nan"),
        ({"server": ServerOptions(root_path="/llm/")}, "--root-path is /llm/; wanted a path such as /llm"),
        ({"server": ServerOptions(root_path="llm")}, "--root-path is llm"),
        ({"server": ServerOptions(root_path="/")}, "--root-path is /"),
        ({"server": ServerOptions(root_path="https://example.org/llm")}, "--root-path is https"),
        ({"scheduler": SchedulerOptions(target_itl_ms=1e308)}, r"--target-itl-ms is 1e\+308"),
        ({"scheduler": SchedulerOptions(max_num_queued_tokens=-1)}, "--max-num-queued-tokens"),
        ({"scheduler": SchedulerOptions(max_num_queued_reqs=0)}, "--max-num-queued-reqs is 0"),
        ({"server": ServerOptions(port=70000)}, "--port is 70000"),
        ({"server": ServerOptions(ssl_keyfile="k")}, "go together"),
        ({"server": ServerOptions(client_endpoint="tcp://127.0.0.1:0")}, "a port from 1 to 65535, such as"),
        ({"server": ServerOptions(client_endpoint="tcp://127.0.0.1:65536")}, "a port from 1 to 65535, such as"),
        ({"server": ServerOptions(client_endpoint="tcp://127.0.0.1:99999")}, "a port from 1 to 65535, such as"),
        ({"server": ServerOptions(shutdown_timeout=1e7)}, r"--shutdown-timeout is 1e\+07; wanted 0 to 86400 seconds"),
        ({"server": ServerOptions(startup_timeout=float("nan"))}, "--startup-timeout is nan"),
    ],
)
def test_contradictions_are_refused_with_their_values(parts, match):
    with pytest.raises(ConfigError, match=match):
        EngineConfig(**parts)


@pytest.mark.parametrize(
    ("endpoint", "keys"),
    [
        ("", ""),
        ("ipc://client.sock", ""),
        ("tcp://127.0.0.1:5555", ""),
        ("tcp://127.1.2.3:1", ""),
        ("tcp://[::1]:5555", ""),
        ("tcp://127.0.0.1:5555", "keys"),
        ("tcp://*:5555", "keys"),
        ("tcp://[::]:5555", "keys"),
        ("tcp://eth0:5555", "keys"),
    ],
)
def test_client_endpoints_that_are_taken(endpoint, keys):
    config = EngineConfig(server=ServerOptions(client_endpoint=endpoint, client_keys=keys), run_dir="r")
    assert config.local_client_endpoint() == ("ipc://r/client.sock" if keys else endpoint)


@pytest.mark.parametrize("address", ["10.0.0.1", "0.0.0.0", "*", "eth0", "128.0.0.1", "localhost.example", "[fe80::1]"])
def test_an_address_that_others_reach_needs_keys(address):
    with pytest.raises(ConfigError, match="which other machines reach: run `launch.py keys DIR`"):
        EngineConfig(server=ServerOptions(client_endpoint=f"tcp://{address}:5555"))


def test_open_limits_are_chosen_for_the_device_and_never_contradict():
    assert step_limits(SchedulerOptions(), "cpu").max_num_batched_tokens == 512
    assert step_limits(SchedulerOptions(), "NVIDIA H200").max_num_seqs == 256
    for seqs in (0, 1, 3000):
        for tokens in (0, 3000):
            limits = step_limits(SchedulerOptions(max_num_seqs=seqs, max_num_batched_tokens=tokens), "cpu")
            assert 1 <= limits.max_num_seqs <= limits.max_num_batched_tokens


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.10", "::1"])
def test_loopback_addresses_are_this_machines_alone(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "127.example.org", "localhost.example.org", ""])
def test_other_addresses_and_names_are_not(host):
    """A name that begins with `127.` was taken for a loopback address."""
    assert not is_loopback(host)
