"""Embeddings of a real engine: the official client, the SDK and `LLM` get what transformers computes."""

import base64
import json
import shutil
import threading

import numpy as np
import openai
import pytest
import torch
import transformers

from frontend import LLM, Client, SamplingParams

pytestmark = pytest.mark.timeout(180)
TEXTS = ["The sea", "The sky is blue, the sea is deep. " * 5, "a"]


@pytest.fixture(scope="module")
def expected(tiny_model_dir):
    """expected(pooling) -> float32 [texts, hidden_size]."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model_dir)
    model = transformers.AutoModel.from_pretrained(tiny_model_dir, dtype=torch.float32)

    def make(pooling: str) -> np.ndarray:
        with torch.no_grad():
            states = [model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0] for text in TEXTS]
        pooled = torch.stack([hidden.mean(0) if pooling == "mean" else hidden[-1] for hidden in states])
        return torch.nn.functional.normalize(pooled, dim=1).numpy()

    return make


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_the_official_client(server, expected, pooling, encoding):
    with openai.OpenAI(base_url=server.ready["http"] + "/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        reply = client.embeddings.create(
            model=model, input=TEXTS, encoding_format=encoding, extra_body={"pooling": pooling}
        )  # fmt: skip
        plain = client.embeddings.create(model=model, input=TEXTS, extra_body={"pooling": pooling})
    vectors = [np.array(entry.embedding) for entry in plain.data]
    np.testing.assert_allclose(vectors, expected(pooling), atol=2e-6)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens > len(TEXTS)
    given = [entry.embedding for entry in reply.data]
    if encoding == "base64":  # asked for, it is not decoded
        given = [np.frombuffer(base64.b64decode(text), "<f4") for text in given]
    np.testing.assert_allclose(given, vectors, atol=1e-6)


def test_generation_beside_it_is_not_disturbed(server):
    """The same greedy tokens while another client embeds without pause."""
    done = threading.Event()

    def embed() -> None:
        with Client(server.ready["client_endpoint"]) as client:
            while not done.is_set():
                client.embed_batch(TEXTS, pooling="mean")

    with Client(server.ready["client_endpoint"]) as client:
        greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        alone = client.generate(TEXTS[0], greedy)
        thread = threading.Thread(target=embed)
        thread.start()
        try:
            beside = client.generate_batch([TEXTS[0]] * 4, greedy)
        finally:
            done.set()
            thread.join()
    assert all(final.samples[0].token_ids == alone.samples[0].token_ids for final in beside)


def test_llm_with_the_pooling_of_a_sentence_transformers_folder(tiny_model_dir, expected, tmp_path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    modules = [{"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
               for index, (path, kind) in enumerate([("", "Transformer"), ("1_Pooling", "Pooling")])]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    with LLM(str(folder), dtype="float32", num_kv_blocks=64, max_model_len=256) as llm:
        outputs = llm.embed(TEXTS)
        np.testing.assert_allclose([output.outputs.embedding for output in outputs], expected("mean"), atol=2e-6)
        assert [output.prompt for output in outputs] == TEXTS
        [one] = llm.embed([5, 6])
        assert (one.prompt, one.prompt_token_count) == (None, 2)
