"""The cost of the frontend: CPU time per streamed token, over the client socket or HTTP, and how evenly tokens arrive.

    python -m benchmarks.frontend [--http] [--streams 256] [--rate 51200] [--clients 1] [--output FILE] [--smoke]
    python -m benchmarks.frontend --streams 8 --rate 800 --tokens 1000 --beside prompts [--frontend-workers N]

The frontend is the real process with its real sockets. A scripted scheduler behind it gives every stream one token per
step at the given rate; client processes before it read the streams and decode them. CPU time is that of the whole
frontend process, its ZeroMQ thread included. Tokens per second are counted at the clients, from the first token of any
stream to the last one of any, the first of each stream left out. A frontend that keeps up reaches the rate and cannot
exceed it, so the rate is by default a little more than the 50,000 that are wanted. A gap is the time between two pieces
of one stream at its client, to be compared with the time of a step. Over HTTP each stream has a connection of its own;
`tokens_per_chunk` says how many tokens came together on average, because the earlier ones had not been sent yet. With
`--beside`, one more client keeps the frontend busy with long work (benchmarks/frontend_load.py): the gaps then say
whether other people's tokens wait for it.

The last line is one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import msgpack
import zmq

from benchmarks import frontend_load, records
from benchmarks.fake_scheduler import LIMITS, FakeScheduler
from benchmarks.http_streams import free_port, read_http_streams
from common import client_messages as wire
from common.config import EngineConfig, ServerOptions
from common.messages import AddRequest
from common.model_cache import default_model_dir
from frontend.client import Client

TARGETS = {"frontend_us_per_token": 3.0, "tokens_per_s": 50_000}
HTTP_TARGETS = {"frontend_us_per_token": 8.0, "tokens_per_s": 50_000}
START_TIMEOUT_S = 20
PROMPT = "The quick brown fox jumps over the lazy dog."
FIRST_WORD_ID = 1000
"""Scripted tokens are the ordinary words from this id on."""


def script(request: AddRequest, sample_index: int) -> Iterator[int]:
    """Words in turn, another start for each request."""
    start = FIRST_WORD_ID + request.request_id % 100
    return cycle(range(start, start + 200))


class Frontend:
    """The real frontend process behind a scripted scheduler; a context manager."""

    def __init__(self, folder: Path, step_interval_s: float, **options: Any) -> None:
        options = {"http": False, "uds": f"{folder}/http.sock", "busy_poll_ms": 0.0, **options}  # polling is no work
        server = ServerOptions(client_endpoint=f"ipc://{folder}/client.sock", **options)
        config = EngineConfig(server=server, run_dir=str(folder), model_dir=str(default_model_dir()))
        (folder / "config.json").write_text(config.to_json())
        self.endpoint = server.client_endpoint
        self.uds = server.uds
        self.port = 0 if server.uds else server.port
        limits = {**vars(LIMITS), "vocab_size": 49_152, "max_model_len": 1 << 20}
        self.scheduler = FakeScheduler(config, script, type(LIMITS)(**limits), step_interval_s)
        self.process = subprocess.Popen([sys.executable, "-m", "frontend", "--config", str(folder / "config.json")])

    def __enter__(self) -> "Frontend":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)
        self.scheduler.close()

    def wait_until_serving(self) -> None:
        """Block until the frontend knows the engine's limits, and has loaded what chats need."""
        with Client(self.endpoint, timeout_s=START_TIMEOUT_S) as client:
            while client.status().state != "serving":
                assert self.process.poll() is None, "the frontend ended"
            client.tokenize([{"role": "user", "content": PROMPT}])

    def cpu_s(self) -> float:
        """Processor time so far, all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    streams: int, rate: float, clients: int, token_count: int, beside: str = "", **options: Any
) -> dict[str, Any]:
    """Run all streams to their end, beside one kind of `frontend_load`; `options` are the frontend's."""
    with (
        tempfile.TemporaryDirectory(prefix="tf-") as folder,
        Frontend(Path(folder), streams / rate, **options) as frontend,
    ):
        frontend.wait_until_serving()
        frontend.scheduler.gate.clear()
        over_http = ["--http", "--client", str(frontend.port)] if frontend.port else ["--client", frontend.endpoint]
        command = [sys.executable, "-m", "benchmarks.frontend", *over_http]
        arguments = ["--streams", str(streams // clients), "--tokens", str(token_count)]
        readers = [subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True) for _ in range(clients)]
        expected = streams // clients * clients
        frontend.scheduler.wait_until(lambda: frontend.scheduler.live_count == expected, START_TIMEOUT_S)
        cpu_s, began_s = frontend.cpu_s(), time.monotonic()
        frontend.scheduler.gate.set()
        with Load(beside, frontend) as load:
            results = [json.loads(reader.communicate()[0]) for reader in readers]
        cpu_s, wall_s = frontend.cpu_s() - cpu_s, max(result["ended_s"] for result in results) - began_s
        total = sum(result["token_count"] for result in results)
        stream_s = max(result["last_s"] for result in results) - min(result["first_s"] for result in results)
    gaps = sorted(gap for result in results for gap in result["gaps_ms"])
    return {
        "frontend_us_per_token": round(cpu_s / total * 1e6, 2),
        "tokens_per_s": round((total - expected) / stream_s),
        "frontend_cpu_share": round(cpu_s / wall_s, 3),
        "gap_ms_p50": round(gaps[len(gaps) // 2], 2),
        "gap_ms_p99": round(gaps[len(gaps) * 99 // 100], 2),
        "gap_ms_max": round(gaps[-1], 2),
        "step_ms": round(streams / rate * 1000, 2),
        "tokens_per_chunk": round(total / sum(result["chunk_count"] for result in results), 2),
        "token_count": total,
        **({"done_beside": load.done_count} if beside else {}),
    }


class Load:
    """Long work for the frontend, in a process of its own; a context manager that ends it.

    Attributes:
        done_count: pieces of work that were done by the end.
    """

    def __init__(self, kind: str, frontend: Frontend) -> None:
        self.done_count = 0
        command = [sys.executable, "-m", "benchmarks.frontend_load", kind, frontend.endpoint, frontend.uds]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if kind else None

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self.done_count = len(self._process.communicate()[0].splitlines())


def read_streams(endpoint: str, streams: int, token_count: int) -> dict[str, Any]:
    """The client's side: start the streams, read them to their end."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.RCVHWM, 0)
    socket.connect(endpoint)
    for number in range(streams):
        params = {"max_tokens": token_count, "ignore_eos": True}
        socket.send(wire.Generate(request_id=f"r{number}", prompt=PROMPT, params=params).to_wire())
    received = ended = chunk_count = 0
    times_s: list[float] = []
    first_s = last_s = 0.0
    while ended < streams:
        message = msgpack.unpackb(socket.recv())
        if message[0] == wire.Deltas.CODE:
            last_s = time.monotonic()
            first_s = first_s or last_s
            received += sum(len(row[3]) // 4 for row in message[1])
            chunk_count += len(message[1])
            if any(row[0] == "r0" for row in message[1]):
                times_s.append(time.monotonic())
        elif message[0] == wire.Final.CODE:
            ended += 1
        else:
            assert message[0] == wire.Pong.CODE, message
    ended_s = time.monotonic()
    socket.close(linger=0)
    context.term()
    gaps_ms = [(later - sooner) * 1000 for sooner, later in pairwise(times_s)]
    return {
        "token_count": received, "chunk_count": chunk_count, "first_s": first_s, "last_s": last_s, "ended_s": ended_s,
        "gaps_ms": gaps_ms,
    }  # fmt: skip


def main() -> None:
    """Parse, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--http", action="store_true", help="over HTTP instead of the client socket")
    parser.add_argument("--streams", type=int, default=256, help="requests that stream at once")
    parser.add_argument("--rate", type=float, default=51_200, help="tokens per second over all streams")
    parser.add_argument("--clients", type=int, default=1, help="client processes that share the streams")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens per stream")
    parser.add_argument("--beside", choices=frontend_load.KINDS, default="", help="long work of another client")
    parser.add_argument("--frontend-workers", type=int, default=1, help="text processes of the frontend")
    parser.add_argument("--smoke", action="store_true", help="a second, for the test suite")
    parser.add_argument("--output", help="file to append the result to")
    parser.add_argument("--client", metavar="ENDPOINT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        if args.http:
            result = read_http_streams(int(args.client), PROMPT, args.streams, args.tokens)
        else:
            result = read_streams(args.client, args.streams, args.tokens)
        print(json.dumps(result))
        return
    if args.smoke:
        args.streams, args.rate, args.tokens = 8, 2000, 50
    options = (
        {"frontend_workers": args.frontend_workers, "http": args.beside in frontend_load.OVER_HTTP}
        if args.beside
        else {}
    )
    if args.http:
        options |= {"uds": "", "port": free_port(), "http": True}
    metrics = measure(args.streams, args.rate, args.clients, args.tokens, args.beside, **options)
    workload = f"{args.streams} streams, {args.clients} clients, {args.rate:g} tokens/s"
    if args.http:
        workload += ", HTTP"
    if args.beside:
        workload += f", beside {args.beside}"
    entry = records.record(
        benchmark="frontend",
        workload=workload,
        metrics=metrics,
        device=records.host_name(),
        limit=HTTP_TARGETS if args.http else TARGETS,
        options=options,
    )
    records.finish(entry, args.output)


if __name__ == "__main__":
    main()
