"""Programs that people point at such a server, run against ours: litellm, langchain-openai, lm-eval.

Their installs are large, so they are no part of the `test` extra: each is skipped where it is not installed.
Run with `pip install litellm langchain-openai 'lm-eval[api]'` and `pytest -m slow tests/e2e/test_other_clients.py`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]

QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]
LONG = [{"role": "user", "content": "the sea " * 2000}]
SCHEMA = {
    "title": "Answer",
    "description": "What is answered.",
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}
TASK = """
task: sea
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder}/sea.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["wet", "dry"]
doc_to_target: 0
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module")
def url(server) -> str:
    return f"{server.ready['http']}/v1"


@pytest.fixture(scope="module")
def model(url) -> str:
    import httpx

    return httpx.get(f"{url}/models", timeout=60).json()["data"][0]["id"]


def test_litellm(url, model):
    litellm = pytest.importorskip("litellm")
    common = {"model": f"openai/{model}", "api_base": url, "api_key": "none"}
    whole = litellm.completion(messages=QUESTION, max_tokens=8, temperature=0, **common)
    assert whole.usage.completion_tokens <= 8 and whole.choices[0].finish_reason in ("length", "stop")
    chunks = list(litellm.completion(messages=QUESTION, max_tokens=8, temperature=0, stream=True, **common))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == whole.choices[0].message.content
    vectors = litellm.embedding(input=["the sea", "the sky"], **common).data
    assert len(vectors) == 2 and len(vectors[0]["embedding"]) == len(vectors[1]["embedding"]) > 0
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=QUESTION, temperature=-1, **common)
    for too_long in ({"messages": LONG}, {"messages": QUESTION, "max_tokens": 10**6}):
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(**too_long, **common)


def test_langchain_openai(url, model):
    langchain_openai = pytest.importorskip("langchain_openai")
    common = {"model": model, "base_url": url, "api_key": "none"}
    chat = langchain_openai.ChatOpenAI(max_tokens=8, temperature=0, **common)
    answer = chat.invoke("Why is the sky blue?")
    assert answer.usage_metadata["output_tokens"] <= 8
    assert "".join(chunk.content for chunk in chat.stream("Why is the sky blue?")) == answer.content
    with pytest.raises(langchain_openai.chat_models.base.OpenAIContextOverflowError):
        chat.invoke(LONG[0]["content"])
    patient = langchain_openai.ChatOpenAI(max_tokens=80, temperature=0, **common)
    shaped = patient.with_structured_output(SCHEMA, method="json_schema").invoke("Is it?")
    assert set(shaped) == {"sure"} and isinstance(shaped["sure"], bool)
    embeddings = langchain_openai.OpenAIEmbeddings(check_embedding_ctx_length=False, **common)
    first, second = embeddings.embed_documents(["the sea", "the sky"])
    assert len(first) == len(second) > 0 and first != second


def test_lm_eval_local_completions(url, model, tiny_model_dir, tmp_path):
    pytest.importorskip("lm_eval")
    questions = [{"question": f"The sea number {number} is"} for number in range(6)]
    (tmp_path / "sea.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "sea.yaml").write_text(TASK.format(folder=tmp_path))
    arguments = f"model={model},base_url={url}/completions,tokenizer={tiny_model_dir},num_concurrent=2,max_retries=1"
    done = subprocess.run(
        [
            sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments, "--tasks",
            "sea", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"),
        ],
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(next(Path(tmp_path / "out").rglob("results*.json")).read_text())["results"]["sea"]
    assert 0.0 <= results["acc,none"] <= 1.0
