"""`LLM` with real processes: results, and an engine that ends with the program that wanted it."""

import subprocess
import sys

import pytest

from common.errors import EngineDeadError, RequestError, TriremeError
from common.sampling_params import SamplingParams
from frontend import LLM
from tests.support.server import wait_for_exit

OPTIONS = {"dtype": "float32", "block_size": 4, "num_kv_blocks": 256, "max_model_len": 256}


@pytest.fixture(scope="module")
def llm(tiny_model_dir):
    with LLM(str(tiny_model_dir), **OPTIONS, busy_poll_ms=20) as running:
        yield running


def test_outputs_come_in_the_order_of_the_prompts(llm):
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = ["The sea", [5, 6, 7], {"prompt_token_ids": [8, 9]}]
    together = llm.generate(prompts, greedy)
    alone = [llm.generate(prompt, greedy)[0] for prompt in prompts]
    assert [output.outputs[0].token_ids for output in together] == [output.outputs[0].token_ids for output in alone]
    assert [output.prompt_token_ids for output in together][1:] == [[5, 6, 7], [8, 9]]
    assert [output.prompt for output in together] == ["The sea", None, None]
    assert all(output.outputs[0].finish_reason == "length" for output in together)


def test_one_set_of_parameters_for_each_prompt(llm):
    each = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, 2, 3)]
    outputs = llm.generate(["a", "b", "c"], each)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]


def test_chats(llm):
    conversation = [{"role": "user", "content": "Hello"}]
    outputs = llm.chat([conversation, conversation], SamplingParams(temperature=0, max_tokens=4))
    assert outputs[0].outputs == outputs[1].outputs
    assert llm.chat(conversation, SamplingParams(temperature=0, max_tokens=4))[0].outputs == outputs[0].outputs


def test_a_bad_prompt_costs_only_its_call(llm):
    with pytest.raises(RequestError, match="256 tokens"):
        llm.generate(["fine", [5] * 256])
    assert llm.generate("fine", SamplingParams(max_tokens=1))[0].outputs[0].finish_reason in ("length", "stop")


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(TriremeError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))


def test_close_leaves_no_process(tiny_model_dir):
    llm = LLM(str(tiny_model_dir), **OPTIONS, busy_poll_ms=1000)
    assert llm.client._busy.limit_s == 1.0
    llm.generate("so that every process polls busily", SamplingParams(max_tokens=1))
    llm.close()
    assert llm._process.returncode == 0
    with pytest.raises(EngineDeadError, match="exit code 0"):
        llm.generate("The sea", use_tqdm=False)


def test_the_engine_ends_with_a_program_that_is_killed(tiny_model_dir):
    code = (
        "import os, signal\n"
        "from frontend import LLM\n"
        f"llm = LLM({str(tiny_model_dir)!r}, **{OPTIONS})\n"
        "print(llm._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stdout, done.stderr
    wait_for_exit(int(done.stdout), "the engine")
