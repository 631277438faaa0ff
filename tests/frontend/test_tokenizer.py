"""The tokenizer against the libraries it stands on, and what it reads from a model's folder."""

import functools
import json

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import pre_tokenizers, processors

from common.errors import ConfigError, RequestError
from common.model_cache import default_model_dir as default_model_dir_path
from common.sampling_params import SamplingParams
from frontend.tokenizer import Tokenizer, _DecoderRules
from tests.support import tiny
from tests.support.decode_all import decode_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tiny.save_tokenizer(path)
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 8], "temperature": 0.6, "top_k": 20, "max_new_tokens": 99, "do_sample": True})
    )
    (path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.load(folder)


def test_encodes_and_renders_as_transformers_does(folder, tokenizer):
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("The sea", "¿Dónde está? 🌊", "<|start|>x<|end|>", "", " "):
        assert list(tokenizer.encode(text)) == reference(text)["input_ids"]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    for add in (True, False):
        expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=add)
        assert tokenizer.render_chat(messages, add_generation_prompt=add) == expected


def test_end_tokens_come_from_all_three_files(tokenizer):
    assert tokenizer.end_token_ids == (1, 7, 8, 9)


@pytest.mark.parametrize(("named", "wanted"), [(-1, ()), ([2, -1], (2,)), (True, ()), (2**40, ()), (2, (2,))])
def test_what_is_no_token_id_is_no_end_token(byte_tokenizer, named, wanted):
    files = {"config.json": {"eos_token_id": named}}
    assert Tokenizer(byte_tokenizer.raw, files).end_token_ids == wanted


def test_sampling_defaults(tokenizer):
    assert tokenizer.sampling_defaults == {"temperature": 0.6, "top_k": 20, "max_tokens": 99}


def test_bos_stands_before_texts_but_not_twice_before_chats(folder):
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    raw.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 0)])
    tokenizer = Tokenizer(raw)
    assert next(iter(tokenizer.encode("a"))) == 0
    assert list(tokenizer.encode("<|start|>a", add_special_tokens=False)).count(0) == 1


def test_a_chat_goes_on_with_its_last_message(tokenizer):
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "The sea is"}]
    assert tokenizer.render_chat(messages, continue_final_message=True).endswith("<|start|>assistant\nThe sea is")


def test_what_a_template_refuses_is_the_clients_error(tokenizer):
    with pytest.raises(RequestError, match="only user messages"):
        tokenizer.render_chat([{"role": "x"}], chat_template="{{ raise_exception('only user messages') }}")
    with pytest.raises(RequestError, match="chat template refuses"):
        tokenizer.render_chat([{"role": "x"}], chat_template="{% for %}")


def test_no_template(byte_tokenizer):
    with pytest.raises(RequestError, match="--chat-template"):
        Tokenizer(byte_tokenizer.raw).render_chat([{"role": "user", "content": "x"}])


def test_a_template_of_ones_own(folder, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}!")
    assert Tokenizer.load(folder, str(tmp_path / "t.jinja")).render_chat([{"role": "x", "content": "y"}]) == "y!"
    with pytest.raises(ConfigError, match="cannot read --chat-template"):
        Tokenizer.load(folder, str(tmp_path / "missing"))


def test_bad_words_are_encoded_at_a_texts_start_and_after_a_space(tokenizer):
    found = tokenizer.bad_word_ids(SamplingParams(bad_words=("sea", " ")))
    assert [tokenizer.decode(ids) for ids in found] == ["sea", " sea"]


def test_folders_without_a_tokenizer_say_so(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer in .*tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot convert the tokenizer in"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read the tokenizer"):
        Tokenizer.load(tmp_path)


def test_lone_surrogates_do_no_harm(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


@pytest.fixture(scope="module")
def default_model_dir():
    folder = default_model_dir_path()
    if not folder.is_dir():
        pytest.skip("the default model is not in the cache")
    return folder


def test_the_default_models_tokenizer_equals_transformers(default_model_dir):
    tokenizer = Tokenizer.load(default_model_dir)
    reference = transformers.AutoTokenizer.from_pretrained(default_model_dir)
    messages = [{"role": "user", "content": "¿Dónde está el café? 🌊"}]
    for text in ("Why is the sky blue?", "def f(x):\n    return x\n", "海は青い 🌊", "<|im_start|>user"):
        ids = tokenizer.encode(text)
        assert list(ids) == reference(text)["input_ids"]
        assert decode_all(tokenizer.detokenizer(skip_special_tokens=False), ids) == text
    rendered = tokenizer.render_chat(messages)
    assert rendered == reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert reference.eos_token_id in tokenizer.end_token_ids


@given(ids=st.lists(st.integers(0, 49_151), max_size=30))
def test_the_default_models_detokenizer_equals_its_own_decode(default_model_dir, ids):
    tokenizer = _loaded(default_model_dir)
    assert decode_all(tokenizer.detokenizer(), ids) == tokenizer.decode(ids)


@functools.cache
def _loaded(folder) -> Tokenizer:
    return Tokenizer.load(folder)


def test_each_character_of_a_byte_level_token_is_a_byte(tokenizer):
    rules = _DecoderRules()
    rules.byte_level = True
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert sorted(rules.token_bytes(character) for character in alphabet) == [bytes([value]) for value in range(256)]
    assert rules.token_bytes("Ġsea") == b" sea"
    for other in (" ", "\x7f", "\xad", "ō", "海"):  # stands for no byte: the token is text
        assert rules.token_bytes(other + "Ġ") == (other + "Ġ").encode()
