"""The command line: every option reachable, files and flags agree, every refusal one line."""

import json
import re

import pytest

from common.cli import OptionParser, all_options, config_from, config_from_options, flags_of, to_arguments
from common.config import EngineConfig
from common.errors import ConfigError


def parse(*arguments: str) -> EngineConfig:
    return config_from(OptionParser(prog="launch.py").parse(arguments))


def test_nothing_given_is_the_default_configuration():
    assert parse() == EngineConfig()


def test_every_option_can_be_given_under_each_of_its_names():
    samples = {str: "x", int: "64", float: "0.5"}
    for group, item in all_options():
        if item.name in (
            "tensor_parallel_size",
            "run_ahead",
            "max_num_batched_tokens",
            "ssl_keyfile",
            "ssl_certfile",
            "client_endpoint",
            "client_keys",
            "allowed_origins",
            "root_path",
        ):
            continue  # values that only go with others
        for flag in flags_of(item):
            if item.type is bool:
                config, wanted = parse(flag), True
            else:
                text = item.metadata["choices"][-1] if item.metadata["choices"] else samples.get(item.type, "x")
                config, wanted = parse(flag, text), ("x",) if item.metadata["repeat"] else type(item.default)(text)
            assert getattr(getattr(config, group), item.name) == wanted, f"{flag} does not set {group}.{item.name}"


def test_there_are_fewer_than_sixty_options():
    assert len(all_options()) < 60


@pytest.mark.parametrize(
    ("text", "number"),
    [("8k", 8000), ("8Ki", 8192), ("4096", 4096), ("1.5k", 1500), ("auto", 0), ("-1", 0), ("2GiB", 1 << 31)],
)
def test_counts_in_human_notation(text: str, number: int):
    assert parse("--max-model-len", text).model.max_model_len == number


@pytest.mark.parametrize(
    ("flag", "text", "wanted"),
    [("--dtype", "half", "float16"), ("--dtype", "float", "float32"), ("--kv-cache-dtype", "fp8_e4m3", "fp8")],
)
def test_other_engines_names_of_values(flag: str, text: str, wanted: str, tmp_path):
    """On the command line and in a file; `--help` names ours alone."""
    file = tmp_path / "options.yaml"
    file.write_text(f"{flag.removeprefix('--')}: {text}\n")
    for config in (parse(flag, text), parse("--config", str(file))):
        assert wanted in (config.model.dtype, config.cache.kv_cache_dtype)


def refusal(tmp_path, flag: str, value: str) -> str:
    """What the command line says to it, where a file and a program say the same."""
    (tmp_path / "options.json").write_text(json.dumps({flag.lstrip("-"): value}))
    texts = []
    for refused in (
        lambda: parse(flag, value),
        lambda: parse("--config", str(tmp_path / "options.json")),
        lambda: config_from_options(**{flag.lstrip("-").replace("-", "_"): value}),
    ):
        with pytest.raises(ConfigError) as caught:
            refused()
        texts.append(str(caught.value).partition(": ")[2])
    assert texts[1].endswith(texts[0]) and texts[2] == texts[0]
    return texts[0]


NUMBERS = [item for _, item in all_options() if item.metadata["count"] or item.type is float]


@pytest.mark.parametrize("item", NUMBERS, ids=lambda item: item.name)
def test_a_value_that_stands_for_another_is_taken_and_named_in_refusals(tmp_path, item):
    """`--busy-poll-ms -1` was refused though --help names it, and other values in words that did not."""
    flag = flags_of(item)[0]
    if item.type is float and item.default < 0:
        assert parse(flag, f"{item.default:g}") == EngineConfig()
        assert f", or {item.default:g} for the default, got '-2'" in refusal(tmp_path, flag, "-2")
    elif item.metadata["count"] and item.default == 0:
        assert parse(flag, "auto") == parse(flag, "-1") == EngineConfig()
        assert refusal(tmp_path, flag, "-2").endswith("got '-2'; 'auto' stands for 0")
    else:
        assert refusal(tmp_path, flag, "-1").endswith("got '-1'")


def test_repeatable_options_collect():
    assert parse("--api-key", "a", "b", "--api-key", "c").server.api_key == ("a", "b", "c")


def test_booleans_have_a_negative():
    assert parse("--no-http").server.http is False


def test_underscores_stand_for_dashes_as_in_vllm():
    config = parse("--max_model_len", "64", "--served_model_name=my_model", "--no_http")
    assert (config.model.max_model_len, config.model.served_model_name, config.server.http) == (
        64,
        ("my_model",),
        False,
    )


@pytest.mark.parametrize("flag", ["--no-enable-prefix-caching", "--disable-radix-cache"])
def test_prefix_cache_switches_of_other_engines(flag: str):
    assert parse(flag).cache.prefix_cache == "off"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--prot", "1"], "unknown argument --prot; did you mean --port?"),
        (["--max-num-seq=1"], "unknown argument --max-num-seq=1; did you mean --max-num-seqs?"),
        (
            ["--compilation-config.mode", "3"],
            "unknown argument --compilation-config.mode; leave it out: kernels and CUDA",
        ),
        (["--swap_space=4"], "unknown argument --swap-space=4; --swap-space-bytes takes bytes (4GiB)"),
        (
            ["--allowed-origins", '["*"]'],
            '--allowed-origins is ["*"]; wanted * or origins such as https://app.example',
        ),
        (["--allowed-origins", "https://a.example/"], "--allowed-origins is https://a.example/; wanted *"),
        (["--allowed-origins", "a.example"], "--allowed-origins is a.example; wanted *"),
        (["--port", "x"], "argument --port: wanted a whole number, got 'x'"),
        (["--port", "70000"], "--port is 70000; wanted 0 to 65535"),
        (["--max-model-len", "8q"], "wanted a whole number such as 4096, 8k or 2GiB, got '8q'"),
        (["--shutdown-timeout", "nan"], "wanted a number from 0 up, got 'nan'"),
        (["--dtype", "int3"], "argument --dtype: invalid choice: 'int3'"),
        (["--stream-interval", "0"], "--stream-interval is 0; wanted at least 1"),
        (["--client-endpoint", "tcp://0.0.0.0:5555"], "run `launch.py keys DIR` and add --client-keys DIR"),
        (["--client-endpoint", "tcp://*:5555"], "--client-endpoint is tcp://*:5555, which other machines reach"),
        (["--client-endpoint", "tcp://[::]:5555"], "--client-endpoint is tcp://[::]:5555, which other machines reach"),
        (["--client-endpoint", "tcp://5555"], "--client-endpoint is tcp://5555; wanted ipc://PATH or tcp://ADDRESS"),
        (["--client-endpoint", f"ipc:///{'x' * 107}"], "wanted a path of at most 107 bytes, got 108"),
        (["--uds", "é" * 54], "--uds is éé"),
        (["--client-keys", "k"], "--client-keys is given, but --client-endpoint is an ipc:// one"),
        (["--model"], "argument --model/--model-path: expected one argument"),
        (["--config", "/nowhere.yaml"], "cannot read /nowhere.yaml: No such file or directory"),
    ],
)
def test_refusals_say_what_was_wanted(arguments: list[str], text: str):
    with pytest.raises(ConfigError) as caught:
        parse(*arguments)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_file_options_and_the_command_line_wins(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("max-model-len: 8k\nport: 9000\nprefix_cache: off\napi-key: [a, b]\nhttp: false\ntp-size: 1\n")
    config = parse("--config", str(file), "--port", "9001")
    assert config.model.max_model_len == 8000
    assert config.server.port == 9001
    assert config.cache.prefix_cache == "off"
    assert config.server.api_key == ("a", "b")
    assert config.server.http is False


def test_json_file(tmp_path):
    file = tmp_path / "options.json"
    file.write_text('{"max-num-seqs": 4, "shutdown-timeout": 1}')
    config = parse("--config", str(file))
    assert (config.scheduler.max_num_seqs, config.server.shutdown_timeout) == (4, 1.0)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("prot: 1", "unknown option 'prot'; did you mean port?"),
        ("port: [1, 2]", "port: wanted one value, got [1, 2]"),
        ("http: maybe", "http: wanted true or false, got 'maybe'"),
        ("dtype: int3", "dtype: wanted one of auto, float32, bfloat16, float16; got 'int3'"),
        ("- 1", "must hold a mapping"),
        ("a: [", "neither YAML nor JSON: expected the node content, but found '<stream end>' in line 1, column 5"),
        ("port: 1\nhost: a: b", "neither YAML nor JSON: mapping values are not allowed here in line 2, column 8"),
        ("a: \x01", "neither YAML nor JSON: unacceptable character #x0001"),
        ("seed: 2024-02-30", "neither YAML nor JSON: day is out of range"),
        ("seed: 0x_", "neither YAML nor JSON: invalid literal"),
        ("seed: " + 20_000 * "[", "neither YAML nor JSON: maximum recursion depth"),
        ('model: "a\\0b"', "model: wanted a text without null characters, got 'a\\x00b'"),
        ('served-model-name: [a, "b\\0"]', "served-model-name: wanted a text without null characters"),
        ("num-kv-blocks: 5\nnum_kv_blocks: 6", "num-kv-blocks and num_kv_blocks are the same option"),
        ("model: a\nmodel-path: b", "model and model-path are the same option"),
        ("port: 1\nhost: a\nport: 1", "'port' stands in lines 1 and 3; wanted it once"),
        ('{"port": 1,\n "p\\u006frt": 2}', "'port' stands in lines 1 and 2; wanted it once"),
        ("model: [{a: 1, a: 2}]", "'a' stands in lines 1 and 1; wanted it once"),
        ("enable-prefix-caching: on\nprefix-cache: off", "enable-prefix-caching and prefix-cache are the same option"),
    ],
)
def test_file_refusals_name_the_file(tmp_path, text: str, error: str):
    file = tmp_path / "options.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse("--config", str(file))
    assert error in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_option_of_a_file_may_replace_one_that_was_merged_into_it(tmp_path):
    """Written twice, it would be refused."""
    (tmp_path / "o.yaml").write_text("seed: 3\n<<: [{port: 1, host: a}, {port: 2}]\nport: 9000\n")
    server = parse("--config", str(tmp_path / "o.yaml")).server
    assert (server.port, server.host) == (9000, "a")


def test_the_name_of_a_host_may_be_longer_than_a_path(tmp_path):
    """It was refused as a path."""
    endpoint = f"tcp://{'.'.join(['x' * 50] * 3)}:5555"
    assert parse("--client-endpoint", endpoint, "--client-keys", str(tmp_path)).server.client_endpoint == endpoint


def test_empty_file_changes_nothing(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    assert parse("--config", str(tmp_path / "empty.yaml")) == EngineConfig()


def test_help_shows_switches_once_and_values_as_people_write_them():
    text = OptionParser(prog="launch.py").format_help()
    assert "--[no-]enforce-eager, --[no-]disable-cuda-graph\n" in text and "--no-enforce-eager" not in text
    assert "(default: 1GiB)" in text and "(default: 600)" in text
    assert "--uds PATH" in text and "--chat-template FILE" in text


@pytest.mark.parametrize("item", [item for _, item in all_options()], ids=lambda item: item.name)
def test_help_shows_the_default_of_every_option_as_one_would_write_it(item):
    """Those of 0 were left out where a 0 stood in what the option does, as in 8192."""
    action = next(each for each in OptionParser()._actions if flags_of(item)[0] in each.option_strings)
    [default] = re.findall(r" \(default: (\S+)\)$", action.help)
    if item.default in ("", ()):
        assert default == "none"
    elif item.type is bool:
        assert default == ("on" if item.default else "off")
    else:
        assert parse(flags_of(item)[0], default) == EngineConfig()


def test_a_configuration_survives_the_way_through_arguments():
    config = config_from_options(
        model="m", max_model_len="8k", http=False, api_key=["a", "b"], gpu_memory_utilization=0.5, enforce_eager=True
    )
    assert parse(*to_arguments(config)) == config
    assert to_arguments(EngineConfig()) == []


def test_all_names_of_an_option_are_its_names_in_python_and_in_files_too(tmp_path):
    """`LLM(enable_prefix_caching=False)` and other engines' names were unknown there."""
    samples = {str: "x", int: 64, float: 0.5, bool: True}
    refused_alone = (
        "tensor_parallel_size",
        "run_ahead",
        "ssl_keyfile",
        "ssl_certfile",
        "client_endpoint",
        "client_keys",
        "allowed_origins",
        "root_path",
    )
    for group, item in all_options():
        if item.name in refused_alone:
            continue
        value = item.metadata["choices"][0] if item.metadata["choices"] else samples.get(item.type, "x")
        for flag in flags_of(item):
            name = flag.lstrip("-")
            (tmp_path / "options.json").write_text(json.dumps({name: value}))
            in_python = config_from_options(**{name.replace("-", "_"): value})
            assert parse("--config", str(tmp_path / "options.json")) == in_python
            found = getattr(getattr(in_python, group), item.name)
            assert found == (("x",) if item.metadata["repeat"] else value), flag


@pytest.mark.parametrize(
    ("name", "value", "cache"),
    [("enable_prefix_caching", True, "hash"), ("enable_prefix_caching", False, "off"),
     ("disable_radix_cache", True, "off"), ("disable_radix_cache", False, "hash")],
)  # fmt: skip
def test_switches_of_the_prefix_cache_in_python_and_in_files(tmp_path, name, value, cache):
    (tmp_path / "options.yaml").write_text(f"{name.replace('_', '-')}: {json.dumps(value)}")
    assert config_from_options(**{name: value}).cache.prefix_cache == cache
    assert parse("--config", str(tmp_path / "options.yaml")).cache.prefix_cache == cache
    with pytest.raises(ConfigError, match=f"{name}: wanted true or false, got 'x'"):
        config_from_options(**{name: "x"})


def test_none_leaves_an_option_of_python_as_it_is():
    assert config_from_options(max_model_len=None, dtype=None, swap_space=None) == EngineConfig()


def test_keyword_options_are_held_to_the_same_rules():
    with pytest.raises(ConfigError, match=r"unknown option 'max_model_length'; did you mean max_model_len\?"):
        config_from_options(max_model_length=1)
    with pytest.raises(ConfigError, match="wanted one of"):
        config_from_options(dtype="int3")
