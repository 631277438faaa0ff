"""Reading config.json: what is supported is read right, what is not is one line that names what is."""

import json

import pytest
import torch
import transformers

from common.errors import ConfigError
from worker_proc.layers.rotary import RotaryEmbedding
from worker_proc.model_config import SUPPORTED_ROPE_TYPES, parse_model_config, read_model_config

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
QWEN = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8}


def parse(**overrides):
    return parse_model_config({**BASE, **overrides}, source="config.json")


def test_defaults():
    config = parse()
    assert (config.head_dim, config.kv_head_count, config.layer_count) == (8, 2, 4)
    assert (config.rope.rope_type, config.rope.theta) == ("default", 10_000.0)
    assert config.sliding_windows == (None,) * 4
    assert not config.tie_word_embeddings
    assert parse(num_key_value_heads=None).kv_head_count == 8


def test_old_and_new_rope_keys_mean_the_same():
    scaling = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
    old = parse(rope_theta=5e5, rope_scaling=scaling)
    new = parse(rope_parameters={"rope_theta": 5e5, "rope_type": "yarn", **scaling})
    assert old.rope == new.rope
    assert old.rope.theta == 5e5


def test_rope_scaling_extends_the_context():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert parse().context_limit == 512
    assert parse(rope_scaling=yarn).context_limit == 2048
    assert parse(rope_scaling=yarn, max_position_embeddings=4096).context_limit == 4096
    assert parse(rope_scaling={"rope_type": "dynamic", "factor": 2.0}).context_limit == 1024
    assert parse(rope_scaling={"rope_type": "linear", "factor": 2.0}).context_limit == 512


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("overrides", [{}, {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2}])
def test_saved_configs_are_read_as_transformers_reads_them(family, overrides, tmp_path):
    theirs = getattr(transformers, f"{family}Config")(num_hidden_layers=4, **overrides)
    theirs.architectures = [f"{family}ForCausalLM"]
    theirs.save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    assert config.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 4
    window = getattr(theirs, "sliding_window", None) if family != "Llama" else None
    expected = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    assert config.sliding_windows == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"architectures": ["BertModel"]}, r"architecture 'BertModel' is not supported; supported: Llama.*, Qwen3"),
        ({"architectures": []}, "architecture None is not supported"),
        (
            {"rope_scaling": {"rope_type": "su"}},
            "rope type 'su' is not supported; supported: default, linear, .*llama3",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3 needs 'low_freq_factor'"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "needs 4 numbers, got 1",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, got 'many'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 2048, got 1000000000"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number, got nan"),
        ({"rope_theta": float("inf")}, "rope_theta must be a finite number, got inf"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": float("-inf")}},
            r"rope_scaling\.factor must be a finite number, got -inf",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [float("nan")] * 4}},
            r"rope_scaling\.long_factor must be a list of finite numbers, got \[nan, ",
        ),
        ({"num_key_value_heads": 3}, "8 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised weights \('gptq'\)"),
        ({"quantization_config": "gptq"}, "quantization_config must be an object, got 'gptq'"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number, got 0"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be a positive number, got -1e-06"),
        ({"head_dim": 0}, "head_dim must be a positive integer, got 0"),
        ({"hidden_size": 60}, "hidden_size 60 is not a multiple of num_attention_heads 8, and there is no head_dim"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window must be a positive integer"),
        (QWEN | {"sliding_window": -4}, "sliding_window must be a positive integer, got -4"),
        (QWEN | {"max_window_layers": -1}, "max_window_layers must be at least 0, got -1"),
        (QWEN | {"layer_types": ""}, "layer_types needs 4 of"),
        ({"rope_theta": 0}, "rope_theta must be above 1, got 0"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, r"rope_scaling\.factor must be a positive number, got 0"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 1e300}}, "factor must be at most 2147483647, got"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 1e8}}, "a context of more than 2147483647 tokens"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2}, "head_dim": 2}, "dynamic needs a head_dim above 2"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor must be above 4, got 4",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 8, "beta_fast": 1, "beta_slow": 2}},
            "beta_fast must be at least 2, got 1",
        ),
        (
            {"rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 1.5}},
            "partial_rotary_factor must be at most 1, got 1.5",
        ),
        (
            {
                "rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [2]},
                "max_position_embeddings": 1,
            },
            "longrope needs max_position_embeddings above 1, got 1",
        ),
        ({"rms_norm_eps": 1e-300}, "rms_norm_eps must be at least 1e-30, got 1e-300"),
        ({"rope_scaling": [1]}, r"rope_scaling must be an object, got \[1\]"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
            r"rope_scaling\.factor must be a finite number, got",
        ),
    ],
)
def test_what_is_not_supported_is_one_line(overrides, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse(**overrides)
    assert "\n" not in str(caught.value)


ROPE_KEYS = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 256, "attention_factor": 1.1, "beta_fast": 32,
             "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": True},
    "longrope": {"factor": 2.0, "original_max_position_embeddings": 256, "attention_factor": 1.1,
                 "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    "llama3": {"factor": 8.0, "original_max_position_embeddings": 256, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
NOT_A_NUMBER = (0, 0.0, -1, -0.5, float("nan"), float("inf"), 10**400, "2", "", True, False, [], [2.0], {}, {"a": 1})
EXTREMES = (5e-324, 1e-40, 1e-7, 1 + 2**-52, 1e30, 3.5e38, 1e300, [5e-324] * 4, [1e-40] * 4, [1e300] * 4)
"""Numbers with which something that is computed would be too small or too large for float32, or end in an exception."""


def rope_spellings(rope_type, values, theta):
    """The same rotary embedding as transformers has written it, before and since its version 5."""
    outside = ("partial_rotary_factor", "original_max_position_embeddings")
    inner = {key: value for key, value in values.items() if key not in outside}
    outer = {key: value for key, value in values.items() if key in outside}
    yield {"rope_theta": theta, "rope_scaling": {"type": rope_type, **values}}
    yield {"rope_theta": theta, "rope_scaling": {"rope_type": rope_type, **inner}, **outer}
    yield {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **values}}
    yield {"rope_theta": theta, "rope_parameters": {"type": rope_type, "rope_type": None, **inner}, **outer}


def computed(config):
    """Every number that the rotary embedding makes of its parameters, at the first and the last positions."""
    embedding = RotaryEmbedding(config, torch.device("cpu"))
    angles = embedding.angles(torch.tensor([0, 1, 255, 511, 600]))
    return torch.cat(
        (angles.cos.flatten(), angles.signed_sin.flatten(), torch.tensor([1 / embedding.attention_factor]))
    )


@pytest.mark.parametrize("rope_type", SUPPORTED_ROPE_TYPES)
def test_rope_parameters_are_refused_or_can_be_computed_with(rope_type):
    """A factor of zero made every angle infinite, one below it a model of another kind, and nothing said so."""
    values, refused = ROPE_KEYS[rope_type], set()
    for spelled in rope_spellings(rope_type, values, 1e4):
        assert parse(**spelled) == parse(rope_parameters={"rope_type": rope_type, "rope_theta": 1e4, **values})
    for key in ("rope_theta", *values):
        for bad in NOT_A_NUMBER + EXTREMES:
            changed = {**values, key: bad}
            theta = changed.pop("rope_theta", 1e4)
            for spelled in rope_spellings(rope_type, changed, theta):
                try:
                    config = parse(**spelled)
                except ConfigError as error:
                    assert key in str(error) and str(error).isprintable()
                    refused.add(key)
                else:
                    assert computed(config).isfinite().all() and config.context_limit >= 512, (key, bad)
    assert refused == {"rope_theta", *values}


def test_a_rope_for_each_kind_of_layer_is_refused_and_not_taken_for_the_default():
    kinds = {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(ConfigError, match="each kind of layer .*'full_attention'.* are not supported"):
        parse(rope_parameters=kinds)


class Asked(dict):
    """A map that knows what it was asked for."""

    def __init__(self, values: dict) -> None:
        super().__init__(values)
        self.keys_asked: set[str] = set()

    def get(self, key, default=None):
        self.keys_asked.add(key)
        return super().get(key, default)


@pytest.mark.parametrize("rope_type", ["linear", "yarn", "llama3", "longrope"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_no_value_of_any_key_is_more_than_one_line(family, rope_type):
    """Many ended the worker with a TypeError that named neither the file nor the key."""
    scaling = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "short_factor": [1.0] * 4,
               "long_factor": [1.0] * 4, "rope_type": rope_type}  # fmt: skip
    base = {**BASE, "architectures": [f"{family}ForCausalLM"], "use_sliding_window": True, "rope_scaling": scaling}
    outer, inner = Asked(base), Asked(scaling)
    parse_model_config(outer | {"rope_scaling": inner}, source="c")
    parse_model_config(outer, source="c")
    assert len(outer.keys_asked) > 15 and len(inner.keys_asked) > 10
    values = ("x", "", [], [1], [[1]], {}, {"a": 1}, True, 0, -1, 1.5, 10**30, 10**400, float("nan"))
    changed = [base | {key: value} for key in outer.keys_asked for value in values]
    changed += [base | {"rope_scaling": scaling | {key: value}} for key in inner.keys_asked for value in values]
    for raw in changed:
        try:
            parse_model_config(raw, source="c")
        except ConfigError as error:
            assert str(error).startswith("c: ") and str(error).isprintable() and len(str(error)) < 300


def test_a_model_that_says_it_is_not_quantised_is_not():
    assert parse(quantization_config=None) == parse()


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*config.json: No such file"):
        read_model_config(tmp_path)
    for text in ("{", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match="cannot read .*config.json"):
            read_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="wanted a JSON object, got list"):
        read_model_config(tmp_path)
