"""Options of vLLM and SGLang that have no equal here: what to take instead, or why there is none.

For the refusal of an unknown option (`common.cli`). Those that have an equal are names of it, in `common.config`.
docs/migrating.md has the same as tables; a test compares the two.
"""

_ONE_GPU_EACH = "run one engine per GPU behind a balancer"
_NOT_YET = "that is not there yet"
_DETECTED = "leave it out: the format is detected from the model's template"
_ALWAYS_ON = "leave it out: it is always on"
_LLGUIDANCE = "leave it out: llguidance compiles all grammars"
_STEP_TOKENS = "--max-num-batched-tokens is the budget of a step, for prompts and decoding"
_EMBEDS = "leave it out: every engine embeds too, and --pooling says how"

INSTEAD = {
    # vLLM
    "--swap-space": "--swap-space-bytes takes bytes (4GiB), and --preemption swap or auto uses them",
    "--enable-chunked-prefill": _ALWAYS_ON,
    "--async-scheduling": "leave it out: --run-ahead is 2 by default, and 0 is off",
    "--pipeline-parallel-size": _ONE_GPU_EACH,
    "--data-parallel-size": _ONE_GPU_EACH,
    "--distributed-executor-backend": "leave it out: each engine runs on one GPU",
    "--quantization": "weights stay as they are; those of a GGUF file are dequantised when they are loaded",
    "--speculative-config": _NOT_YET,
    "--enable-lora": _NOT_YET,
    "--limit-mm-per-prompt": "leave it out: models get text alone",
    "--trust-remote-code": "code from a model's repository is never run",
    "--enable-auto-tool-choice": _DETECTED,
    "--tool-call-parser": _DETECTED,
    "--reasoning-parser": _DETECTED,
    "--runner": _EMBEDS,
    "--pooler-config": _EMBEDS,
    "--guided-decoding-backend": _LLGUIDANCE,
    "--tokenizer-mode": "leave it out: tokenizers are those of transformers",
    "--download-dir": "the environment variable HF_HOME says where models from the hub are kept",
    "--hf-token": "the environment variable HF_TOKEN holds the key to the hub",
    "--max-logprobs": "leave it out: a token has up to 20",
    "--uvicorn-log-level": "--log-level is that of the whole engine",
    "--disable-log-stats": "leave it out: the log has none",
    "--disable-log-requests": "leave it out: requests are logged with --enable-log-requests only",
    # SGLang
    "--chunked-prefill-size": _STEP_TOKENS,
    "--max-prefill-tokens": _STEP_TOKENS,
    "--disable-overlap-schedule": "--run-ahead 0 does that",
    "--schedule-policy": "--policy takes fcfs, priority or fair",
    "--dp-size": _ONE_GPU_EACH,
    "--enable-metrics": _ALWAYS_ON,
    "--is-embedding": _EMBEDS,
    "--grammar-backend": _LLGUIDANCE,
    "--speculative-algorithm": _NOT_YET,
    "--lora-paths": _NOT_YET,
}
"""What follows the refusal of each, after "unknown argument --name; "."""
