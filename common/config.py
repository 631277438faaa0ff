"""The configuration: one frozen dataclass per group, one definition per option, validated once and passed whole.

Each field has its flags (the vLLM name first, the SGLang name as alias), help text and parser. `common.cli` makes the
command line from them, and this module the JSON that child processes read. `check` compares options with one another;
every error names the two values that disagree. Unknown keys are refused.
"""

import dataclasses
import ipaddress
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ConfigError

DEFAULT_MODEL = "default"
"""The name of the embedded default model."""

TIMEOUT_LIMIT_S = 86_400
FRONTEND_WORKERS_LIMIT = 64
BUSY_POLL_LIMIT_MS = 1000
BUSY_POLL_AUTOMATIC = -1.0
"""The milliseconds of busy polling that leave it to the machine."""
BUSY_POLL_IO = ("auto", "always", "never")
"""Whether ZeroMQ's own threads are kept awake."""
SOCKET_PATH_LIMIT = 107
"""Bytes of a Unix socket's path, at most."""
PORT_LIMIT = 65_535
"""ZeroMQ takes a larger port modulo 65,536, without a word."""

_UNITS = {"": 1, "k": 1000, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def parse_count(text: str) -> int:
    """A whole number as people write it: `4096`, `8k` (8,000), `8Ki` (8,192), `2GiB`.

    Raises:
        ConfigError: anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgG]?i?)[bB]?\s*", text)
    if not match or match[2].lower() not in _UNITS:
        raise ConfigError(f"wanted a whole number such as 4096, 8k or 2GiB, got {text!r}")
    value = float(match[1]) * _UNITS[match[2].lower()]
    if value != int(value):
        raise ConfigError(f"wanted a whole number, got {text!r}")
    return int(value)


def option(
    default: Any,
    help: str,
    *flags: str,
    choices: tuple[str, ...] = (),
    synonyms: Mapping[str, str] | None = None,
    count: bool = False,
    repeat: bool = False,
    metavar: str = "",
) -> Any:
    """A dataclass field that is a command line option.

    Args:
        default: its value when the option is not given.
        help: one sentence for `--help`.
        flags: all names, the first is derived from the field's name if none is given.
        choices: the only values allowed.
        synonyms: other engines' names for some of them.
        count: the value is an integer in human notation (`8k`).
        repeat: the option may be given several times and collects a tuple.
        metavar: what `--help` calls its value; by default N or the last word of its name.
    """
    metadata = {
        "help": help, "flags": flags, "choices": choices, "synonyms": synonyms or {}, "count": count,
        "repeat": repeat, "metavar": metavar,
    }  # fmt: skip
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model and its precision."""

    model: str = option(
        DEFAULT_MODEL, "model folder, .gguf file or hub id; 'default' is the embedded model", "--model", "--model-path"
    )
    tokenizer: str = option("", "tokenizer folder or hub id, if not the model's", "--tokenizer", "--tokenizer-path")
    revision: str = option("", "revision of a hub model")
    served_model_name: tuple[str, ...] = option((), "name or names that the API answers to", repeat=True)
    load_format: str = option(
        "auto", "format of the weights; dummy uses random ones", choices=("auto", "safetensors", "gguf", "dummy")
    )
    dtype: str = option("auto", "element type of weights and activations",
                        choices=("auto", "float32", "bfloat16", "float16"),
                        synonyms={"float": "float32", "half": "float16"})  # fmt: skip
    device: str = option("auto", "where the worker runs", choices=("auto", "cpu", "cuda"))
    max_model_len: int = option(
        0, "most tokens of a request, prompt and output; 0: the model's limit, or what fits into the cache",
        "--max-model-len", "--context-length", count=True,
    )  # fmt: skip
    chat_template: str = option("", "file with a chat template to use instead of the model's", metavar="FILE")
    generation_config: str = option(
        "auto", "'auto' takes sampling defaults from the model's generation_config.json, 'vllm' takes none",
        choices=("auto", "vllm"),
    )  # fmt: skip
    pooling: str = option(
        "auto",
        "how embeddings are made: from the last token's hidden state, the mean of all tokens', or the first's (cls); "
        "auto: as the model's folder says, otherwise last",
        choices=("auto", "last", "mean", "cls"),
    )
    seed: int = option(0, "seed for dummy weights and for requests without a seed", "--seed", "--random-seed")


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The KV cache."""

    block_size: int = option(16, "tokens per KV block, a power of two", "--block-size", "--page-size", count=True)
    kv_cache_dtype: str = option(
        "auto",
        "element type of the KV cache; int8 and fp8 take about half the memory of 16 bits",
        choices=("auto", "int8", "fp8"),
        synonyms={"fp8_e4m3": "fp8"},
    )
    gpu_memory_utilization: float = option(
        0.9, "share of the GPU's memory that the worker may use", "--gpu-memory-utilization", "--mem-fraction-static"
    )
    cpu_kv_cache_bytes: int = option(1 << 30, "bytes of KV cache when the worker runs on the CPU", count=True)
    num_kv_blocks: int = option(
        0, "number of KV blocks; 0: as many as fit into the memory",
        "--num-kv-blocks", "--num-gpu-blocks-override", count=True,
    )  # fmt: skip
    swap_space_bytes: int = option(0, "bytes of host memory for the KV blocks of swapped requests", count=True)
    prefix_cache: str = option(
        "hash",
        "how cached prefixes are found: by hashes of whole blocks, or to the token",
        choices=("hash", "radix", "off"),
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Which requests run in a step."""

    max_num_seqs: int = option(
        0, "sequences that run at the same time; 0: 256 on a GPU and 64 on a CPU",
        "--max-num-seqs", "--max-running-requests", count=True,
    )  # fmt: skip
    max_num_batched_tokens: int = option(
        0, "tokens that a step may compute; 0: 8192 on a GPU and 512 on a CPU", count=True
    )
    max_num_queued_reqs: int = option(
        4096, "requests that may wait; more are refused", "--max-num-queued-reqs", "--max-queued-requests", count=True
    )
    max_num_queued_tokens: int = option(
        0, "prompt tokens that may wait; requests with more are refused; 0: no limit", count=True
    )
    run_ahead: int = option(2, "steps planned ahead of the results of earlier ones (0, 1 or 2)")
    policy: str = option(
        "fcfs", "order of waiting requests", "--policy", "--scheduling-policy", choices=("fcfs", "priority", "fair")
    )
    preemption: str = option(
        "recompute", "what happens to the KV of a preempted request", choices=("recompute", "swap", "auto")
    )
    target_itl_ms: float = option(
        0.0, "time between tokens to aim for, by limiting the prompt tokens of a step; 0: none"
    )


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """How steps are computed."""

    tensor_parallel_size: int = option(1, "GPUs that share each layer", "--tensor-parallel-size", "-tp", "--tp-size")
    enforce_eager: bool = option(
        False, "run without CUDA Graphs (for debugging)", "--enforce-eager", "--disable-cuda-graph"
    )
    deterministic: bool = option(
        False, "bit-identical results for a request, whatever else the engine does; slower",
        "--deterministic", "--enable-deterministic-inference",
    )  # fmt: skip
    cpu_threads: int = option(0, "threads of the CPU worker; 0: one per core that it may use", count=True)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How clients reach the engine."""

    host: str = option("127.0.0.1", "address of the HTTP API")
    port: int = option(8000, "port of the HTTP API; 0: any free one")
    uds: str = option("", "serve HTTP on this Unix socket instead of host and port", metavar="PATH")
    http: bool = option(True, "serve the HTTP API")
    client_endpoint: str = option("", "endpoint of the client socket; none: an ipc:// one in the run directory")
    client_keys: str = option(
        "",
        "folder of keys (from `launch.py keys`) for a client socket that is open to other machines",
        metavar="DIR",
    )
    frontend_workers: int = option(
        1, "processes that tokenize long texts, started when the first one comes; 0: threads do it"
    )
    api_key: tuple[str, ...] = option((), "key that HTTP clients must send", repeat=True)
    allowed_origins: tuple[str, ...] = option(
        (), "origins that browsers may call from (CORS)", repeat=True, metavar="ORIGIN"
    )
    root_path: str = option("", "path prefix that a reverse proxy adds")
    ssl_keyfile: str = option("", "TLS key, in PEM and without a passphrase", metavar="FILE")
    ssl_certfile: str = option("", "TLS certificate, in PEM", metavar="FILE")
    stream_interval: int = option(1, "tokens per streamed chunk")
    metrics_prefix: str = option("trireme:", "prefix of all names in /metrics; vllm: fits dashboards made for vLLM")
    busy_poll_ms: float = option(
        BUSY_POLL_AUTOMATIC,
        "milliseconds that every process goes on asking for messages after one, before it sleeps; -1: 5 with a GPU and "
        "at least 8 processors, otherwise 0",
    )
    busy_poll_io: str = option(
        "auto", "whether ZeroMQ's own threads are kept awake while asking, by another processor a process (Linux); "
        "auto: if --busy-poll-ms is left to the machine, which has at least 16 processors",
        choices=BUSY_POLL_IO,
    )  # fmt: skip
    shutdown_timeout: float = option(10.0, "seconds that requests in flight have to finish at shutdown")
    startup_timeout: float = option(600.0, "seconds until all processes must be ready")
    restart: bool = option(False, "restart a lost process; requests in flight continue from the tokens they had")
    restart_limit: int = option(3, "restarts allowed within five minutes; one more loss ends the run")


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """What is written to stderr."""

    log_level: str = option("info", "lowest severity that is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = option("text", "format of log lines", choices=("text", "json"))
    enable_log_requests: bool = option(
        False, "log one line for each finished request", "--enable-log-requests", "--log-requests"
    )


@dataclass(frozen=True, kw_only=True)
class ProfilingOptions:
    """Recordings and traces."""

    record: str = option(
        "",
        "record all messages of every process in this folder, for `python -m worker_proc.replay DIR` and those of "
        "scheduler_proc and frontend",
        metavar="DIR",
    )
    profile: str = option("", "write a trace of a process's first steps", choices=("worker", "scheduler", "frontend"))
    profile_steps: int = option(50, "steps in a trace", count=True)
    profile_dir: str = option(
        "", "folder for traces; allows /start_profile and /stop_profile; with --profile alone it is profiles"
    )

    @property
    def folder(self) -> str:
        """Where traces go; empty when none may be made."""
        return self.profile_dir or ("profiles" if self.profile else "")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that the processes are told at start.

    Attributes:
        run_dir: the instance's own directory (mode 0700) with its sockets.
        model_dir, tokenizer_dir: the local folders that `model` and `tokenizer` were resolved to.
        session: how often the engine's processes had been started again when this one was started.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    worker: WorkerOptions = field(default_factory=WorkerOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    log: LogOptions = field(default_factory=LogOptions)
    profiling: ProfilingOptions = field(default_factory=ProfilingOptions)
    run_dir: str = ""
    model_dir: str = ""
    tokenizer_dir: str = ""
    session: int = 0

    def __post_init__(self) -> None:
        check(self)

    def to_json(self) -> str:
        """The configuration as JSON, for the child processes."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "EngineConfig":
        """Build from `to_json`'s output.

        Raises:
            ConfigError: not JSON, an unknown key, or values that disagree.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"the configuration is not JSON: {error}") from None
        return cls(**_typed(cls, values))

    def model_name(self) -> str:
        """The name that the API answers to first."""
        if self.model.served_model_name:
            return self.model.served_model_name[0]
        return "smollm2-135m-instruct" if self.model.model == DEFAULT_MODEL else self.model.model

    def endpoint(self, name: str, session: int | None = None) -> str:
        """The ipc endpoint of an internal socket: `requests`, `outputs`, `plans-0`, `results`, `supervisor`.

        Args:
            name: the socket's.
            session: whose sockets; by default this process's. Each session has sockets of its own, so that nothing that
                a lost process sent can reach its successor. The supervisor's socket is of session 0: it outlives all.
        """
        return f"ipc://{Path(self.run_dir) / in_session(name, self.session if session is None else session)}.sock"

    def local_client_endpoint(self) -> str:
        """Where this user's programs on this machine reach the client socket without keys."""
        return self.endpoint("client", 0) if self.server.client_keys else self.server.client_endpoint


def in_session(name: str, session: int) -> str:
    """What a socket or a process is called in a session, so that it is never taken for that of an earlier one."""
    return f"{name}.{session}" if session else name


GROUPS: dict[str, type] = {
    "model": ModelOptions,
    "cache": CacheOptions,
    "scheduler": SchedulerOptions,
    "worker": WorkerOptions,
    "server": ServerOptions,
    "log": LogOptions,
    "profiling": ProfilingOptions,
}


def _typed(cls: type, values: Any) -> dict[str, Any]:
    known = {item.name for item in dataclasses.fields(cls)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(f"unknown configuration key {unknown[0]!r}; known are {', '.join(sorted(known))}")
    typed: dict[str, Any] = {}
    for name, value in values.items():
        if cls is EngineConfig and name in GROUPS:
            typed[name] = GROUPS[name](**_typed(GROUPS[name], value))
        else:
            typed[name] = tuple(value) if isinstance(value, list) else value
    return typed


def check(config: EngineConfig) -> None:
    """Refuse values that are out of range or disagree.

    Raises:
        ConfigError: one line that names the option, its value, and what it disagrees with.
    """
    cache, scheduler, server = config.cache, config.scheduler, config.server
    if cache.block_size < 1 or cache.block_size & (cache.block_size - 1) or cache.block_size > 256:
        raise ConfigError(f"--block-size is {cache.block_size}; wanted a power of two from 1 to 256")
    if not 0.05 <= cache.gpu_memory_utilization <= 0.99:
        raise ConfigError(f"--gpu-memory-utilization is {cache.gpu_memory_utilization}; wanted 0.05 to 0.99")
    if scheduler.run_ahead not in (0, 1, 2):
        raise ConfigError(f"--run-ahead is {scheduler.run_ahead}; wanted 0, 1 or 2")
    if scheduler.max_num_seqs > 65536:
        raise ConfigError(f"--max-num-seqs is {scheduler.max_num_seqs}; at most 65536 fit the step plan")
    if 0 < scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens is {scheduler.max_num_batched_tokens}, less than --max-num-seqs, which is "
            f"{scheduler.max_num_seqs}: each running sequence needs one token of a step"
        )
    if 0 < scheduler.max_num_batched_tokens < cache.block_size:
        raise ConfigError(
            f"--max-num-batched-tokens is {scheduler.max_num_batched_tokens}, less than --block-size, which is "
            f"{cache.block_size}: a step should hold at least a block"
        )
    if scheduler.preemption == "swap" and not cache.swap_space_bytes:
        raise ConfigError("--preemption is swap, but --swap-space-bytes is 0: there is nowhere to swap to")
    if scheduler.max_num_queued_tokens < 0:
        raise ConfigError("--max-num-queued-tokens cannot be negative; 0 sets no limit")
    if not 0 <= scheduler.target_itl_ms <= TIMEOUT_LIMIT_S * 1000:
        raise ConfigError(
            f"--target-itl-ms is {scheduler.target_itl_ms:g}; wanted milliseconds up to a day's, or 0 for no target"
        )
    if scheduler.max_num_queued_reqs < 1:
        raise ConfigError(f"--max-num-queued-reqs is {scheduler.max_num_queued_reqs}; wanted at least 1")
    _check_server(server)
    if config.model.max_model_len < 0 or config.cache.num_kv_blocks < 0:
        raise ConfigError("--max-model-len and --num-kv-blocks cannot be negative")
    if config.profiling.profile_steps < 1:
        raise ConfigError(f"--profile-steps is {config.profiling.profile_steps}; wanted at least 1")
    if config.worker.tensor_parallel_size != 1:
        raise ConfigError("--tensor-parallel-size: only 1 is supported so far")


def _check_server(server: ServerOptions) -> None:
    if not 0 <= server.port <= PORT_LIMIT:
        raise ConfigError(f"--port is {server.port}; wanted 0 to {PORT_LIMIT}")
    if bool(server.ssl_keyfile) != bool(server.ssl_certfile):
        raise ConfigError("--ssl-keyfile and --ssl-certfile go together; only one was given")
    for name, seconds in (("shutdown", server.shutdown_timeout), ("startup", server.startup_timeout)):
        if not 0 <= seconds <= TIMEOUT_LIMIT_S:  # a NaN is refused too
            raise ConfigError(f"--{name}-timeout is {seconds:g}; wanted 0 to {TIMEOUT_LIMIT_S} seconds (a day)")
    for origin in server.allowed_origins:
        if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s,\"']+", origin):
            raise ConfigError(
                f"--allowed-origins is {origin}; wanted * or origins such as https://app.example, each a word"
            )
    if not re.fullmatch(r"(/[^/?#\s]+)*", server.root_path):
        raise ConfigError(f"--root-path is {server.root_path}; wanted a path such as /llm, without a slash at its end")
    check_busy_poll_ms("--busy-poll-ms", server.busy_poll_ms)
    if server.busy_poll_io == "always" and sys.platform != "linux":
        raise ConfigError("--busy-poll-io needs Linux: its sockets have names and no files")
    if server.restart_limit < 1:
        raise ConfigError(f"--restart-limit is {server.restart_limit}; wanted at least 1")
    if server.stream_interval < 1:
        raise ConfigError(f"--stream-interval is {server.stream_interval}; wanted at least 1")
    if not re.fullmatch(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?", server.metrics_prefix):
        raise ConfigError(f"--metrics-prefix is {server.metrics_prefix}; wanted letters, digits, _ and : only")
    if not 0 <= server.frontend_workers <= FRONTEND_WORKERS_LIMIT:
        raise ConfigError(f"--frontend-workers is {server.frontend_workers}; wanted 0 to {FRONTEND_WORKERS_LIMIT}")
    _check_client_endpoint(server)
    for name, path in (("uds", server.uds), ("client-endpoint", server.client_endpoint.partition("ipc://")[2])):
        if (size := len(path.encode(errors="replace"))) > SOCKET_PATH_LIMIT:
            raise ConfigError(f"--{name} is {path}; wanted a path of at most {SOCKET_PATH_LIMIT} bytes, got {size}")


def check_busy_poll_ms(name: str, value_ms: float) -> None:
    """Refuse what are no milliseconds of busy polling, under the name that the caller knows them by.

    Raises:
        ConfigError: neither BUSY_POLL_AUTOMATIC nor milliseconds that are allowed.
    """
    is_number = type(value_ms) in (int, float)
    if not (is_number and (value_ms == BUSY_POLL_AUTOMATIC or 0 <= value_ms <= BUSY_POLL_LIMIT_MS)):
        raise ConfigError(f"{name} is {value_ms!r}; wanted 0 to {BUSY_POLL_LIMIT_MS}, or -1 to leave it to the machine")


def _check_client_endpoint(server: ServerOptions) -> None:
    endpoint = server.client_endpoint
    if server.client_keys and not endpoint.startswith("tcp://"):
        raise ConfigError(
            f"--client-keys is given, but --client-endpoint is {endpoint or 'an ipc:// one'}: keys are for a tcp:// "
            "endpoint, such as tcp://0.0.0.0:5555; a socket file is its owner's alone without them"
        )
    form = re.fullmatch(r"ipc://.+|tcp://([^:\[\]\s]+|\[[\da-fA-F:.]+\]):([1-9]\d{0,4})", endpoint)
    if endpoint and not (form and int(form[2] or 0) <= PORT_LIMIT):
        raise ConfigError(
            f"--client-endpoint is {endpoint}; wanted ipc://PATH or tcp://ADDRESS:PORT with a port from 1 to "
            f"{PORT_LIMIT}, such as tcp://127.0.0.1:5555"
        )
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if endpoint.startswith("tcp://") and not (is_loopback(host) or server.client_keys):
        raise ConfigError(
            f"--client-endpoint is {endpoint}, which other machines reach: run `launch.py keys DIR` and add "
            "--client-keys DIR, or take a loopback address such as tcp://127.0.0.1:5555"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address: `localhost`, 127.0.0.0/8 or ::1."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may stand for any address
        return False


@dataclass(frozen=True)
class StepLimits:
    """How many sequences and tokens a step may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int


def step_limits(options: SchedulerOptions, device_name: str) -> StepLimits:
    """The options' limits, with what was left open chosen for the device (`cpu`, or a GPU's name).

    Scheduler and worker both call this, so that they agree on the number of slots.
    """
    on_cpu = device_name == "cpu"
    tokens = options.max_num_batched_tokens or max(512 if on_cpu else 8192, options.max_num_seqs)
    seqs = options.max_num_seqs or min(64 if on_cpu else 256, tokens)
    return StepLimits(seqs, tokens)


def with_changes(config: EngineConfig, **changes: Any) -> EngineConfig:
    """The configuration with top-level fields replaced, checked again."""
    return dataclasses.replace(config, **changes)
