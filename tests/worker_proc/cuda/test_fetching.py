"""Steps that fetch their plans and write their ids themselves: host and device agree about whose turn it is.

Fault F12's neighbour: with steps in flight, one that takes another's plan or another's line of results gives somebody
else's tokens, and nothing fails.
"""

from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import SimpleNamespace

import pytest
import torch

from common.config import StepLimits
from common.messages import SlotSampling
from worker_proc.cuda import staging
from worker_proc.cuda.lanes import LANE_COUNT
from worker_proc.cuda.runner import CudaRunner
from worker_proc.cuda.slots import DeviceSlots
from worker_proc.kv_cache import KVCache, LayerCacheSpec

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU in this process")
devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)
VOCABULARY, SLOTS, BLOCKS, BLOCK_SIZE, MAX_LEN, MAX_TOKENS = 97, 4, 64, 4, 64, 32


class CountingForward:
    """A pass whose likeliest token is the one after the row's last: every answer counts up, in its own place."""

    capturable, fixed_order = True, False

    def __init__(self, device: str) -> None:
        self.logits = torch.zeros(SLOTS, VOCABULARY, device=device)
        self.failing = False

    def shortened(self) -> "CountingForward":
        return self

    def run(self, bucket, inputs, *_) -> torch.Tensor:
        if self.failing and is_recording():
            self.failing = False
            raise RuntimeError("out of shared memory")
        last = inputs.token_ids[inputs.sample_rows.clamp(min=0).long()]
        logits = self.logits[: bucket.rows].zero_()
        return logits.scatter_(1, (last.long()[:, None] + 1) % VOCABULARY, 1.0)

    def token_logits(self, first_token: int, count: int) -> torch.Tensor:
        raise AssertionError("nobody asked for it")

    token_hidden = token_logits


class RecordedGraph:
    """Stands for torch.cuda.CUDAGraph: recording runs nothing on the device, a replay runs what was recorded."""

    being_recorded: "RecordedGraph | None" = None

    def replay(self) -> None:
        self.run_step()


def is_recording() -> bool:
    return RecordedGraph.being_recorded is not None or (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )


@contextmanager
def recording(graph, **_):
    RecordedGraph.being_recorded = graph
    try:
        yield
    finally:
        RecordedGraph.being_recorded = None


def record_graphs(runner: CudaRunner, monkeypatch) -> None:
    """Let a runner without a GPU capture and replay its steps."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    program = runner.program
    run = program._run

    def run_or_record(forward, bucket, sampling, host):
        graph = RecordedGraph.being_recorded
        if graph is None:
            return run(forward, bucket, sampling, host)
        if forward.failing:
            forward.run(bucket, None)
        graph.run_step = partial(run, forward, bucket, sampling, host)
        return forward.logits[: bucket.rows]

    monkeypatch.setattr(program, "_run", run_or_record)
    program.uses_graphs = runner.pads_steps = True


@pytest.fixture
def make_counting(plan_driver, monkeypatch):
    """make(device, fetching, eager) -> a PlanDriver over a runner of a CountingForward."""

    def make(device: str, *, fetching: bool = True, eager: bool = False):
        monkeypatch.setattr(staging, "FETCHING", fetching)
        place = torch.device(device)
        if device == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream())
        cache = KVCache(
            [LayerCacheSpec("full", 1, 16, 16, torch.float32)], block_size=BLOCK_SIZE,
            block_count=BLOCKS, host_block_count=0, device=place,
        )  # fmt: skip
        slots = DeviceSlots(SLOTS, MAX_LEN, BLOCK_SIZE, VOCABULARY, place)
        forward = CountingForward(device)
        runner = CudaRunner(forward, cache, slots, StepLimits(SLOTS, MAX_TOKENS), VOCABULARY, eager=eager)
        if device == "cpu" and not eager:
            record_graphs(runner, monkeypatch)
        driver = plan_driver(lambda plan: runner.execute(plan).result(), SLOTS, BLOCKS, BLOCK_SIZE)
        driver.runner, driver.forward = runner, forward
        return driver

    return make


@dataclass
class Traffic:
    """Random steps of any kind, issued ahead of their results."""

    driver: object
    seed: int
    depth: int
    running: list = field(default_factory=list)
    everybody: list = field(default_factory=list)
    in_flight: deque = field(default_factory=deque)
    steps: int = 0

    def __post_init__(self) -> None:
        self.chance = Random(self.seed)

    def run(self, count: int) -> None:
        for _ in range(count):
            self._disturb()
            self._issue(self._rows())
            while len(self.in_flight) > self.depth:
                self._settle()
        while self.in_flight:
            self._settle()

    def _disturb(self) -> None:
        """What is no step: captures ahead, one that fails; and requests that come and go."""
        chance = self.chance
        if chance.random() < 0.2:
            self.driver.forward.failing = True
        if chance.random() < 0.3:
            self.driver.runner.prepare_next()
        if len(self.running) < SLOTS and chance.random() < 0.6:
            sampling = SlotSampling(temperature=0.0, logprobs=chance.choice([-1, -1, 1]))
            prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 9))]
            self.running.append(self.driver.add(prompt, sampling))
            self.everybody.append(self.running[-1])
        for request in [r for r in self.running if r.started and (len(r.tokens) > 40 or chance.random() < 0.05)]:
            self.running.remove(request)
            self.driver.remove(request)

    def _rows(self) -> list:
        """Some of those that run, prompts in chunks; at times nobody."""
        chosen = [r for r in self.running if self.chance.random() < 0.8]
        return [(r, min(len(r.tokens) - r.computed, self.chance.randint(1, 6))) for r in chosen]

    def _issue(self, rows: list) -> None:
        plan = self.driver.plan(rows)
        places = [(request, len(request.tokens)) for request in self.driver._sampled]
        for request in self.driver._sampled:
            request.tokens.append(-1)
        self.in_flight.append((places, self.driver.runner.execute(plan)))
        self.steps += 1

    def _settle(self) -> None:
        places, pending = self.in_flight.popleft()
        result = pending.result()
        assert len(result.token_ids) == len(places)
        for (request, place), token in zip(places, result.token_ids, strict=True):
            request.tokens[place] = token

    def check(self) -> None:
        """Every answer counts up from the end of its prompt."""
        answered = 0
        for request in self.everybody:
            last = request.tokens[request.prompt_count - 1]
            want = [(last + 1 + place) % VOCABULARY for place in range(len(request.output))]
            assert request.output == want, f"slot {request.slot}"
            answered += len(want)
        assert answered > self.steps / 2, "next to nothing was sampled"


def turn(driver) -> int:
    return int(driver.runner.program._host.turn)


@devices
@pytest.mark.parametrize(("eager", "seed"), [(False, 0), (False, 1), (True, 2)])
def test_host_and_device_take_turns_alike_over_any_steps_captures_and_failures(device, eager, seed, make_counting):
    driver = make_counting(device, eager=eager)
    traffic = Traffic(driver, seed, depth=seed + 2)
    traffic.run(300 if device == "cuda" else 24)
    traffic.check()
    assert turn(driver) == (traffic.steps - 1) % LANE_COUNT
    assert eager or driver.runner.program.graph_count > 4


@devices
def test_preparing_takes_nobodys_turn(device, make_counting):
    driver = make_counting(device)
    request = driver.add([5])
    driver.runner.execute(driver.plan([(request, 1)])).result()
    before = turn(driver)
    while driver.runner.prepare_next():
        pass
    assert turn(driver) == before and driver.runner.program.graph_count > 3
    driver.forward.failing = True
    request.tokens.append(6)
    assert list(driver.runner.execute(driver.plan([(request, 1)])).result().token_ids) == [7]
    assert turn(driver) == before + 1


@devices
def test_a_step_without_rows_takes_its_turn(device, make_counting):
    driver = make_counting(device)
    for step in range(LANE_COUNT + 2):
        assert not driver.runner.execute(driver.plan([])).result().token_ids
        assert turn(driver) == step % LANE_COUNT


@devices
def test_a_turn_too_many_is_told_and_not_taken_for_a_result(device, make_counting):
    driver = make_counting(device)
    request = driver.add([5])
    driver.runner.execute(driver.plan([(request, 1)])).result()
    driver.runner.program.skip()
    request.tokens.append(6)
    with pytest.raises(RuntimeError, match="lane 1: the host's step is 1, the device's 0"):
        driver.runner.execute(driver.plan([(request, 1)])).result()


@devices
def test_what_does_not_fit_behind_the_plan_is_copied(device, make_counting, monkeypatch):
    monkeypatch.setattr(staging, "WRITE_ROOM", 60)
    apart = []
    copy = staging.StagingRing._copy_apart
    monkeypatch.setattr(staging.StagingRing, "_copy_apart", lambda *a: apart.append(len(a[1])) or copy(*a))
    driver = make_counting(device)
    requests = [driver.add(list(range(count))) for count in (20, 2, 25)]
    driver.run(requests, 3, chunk=8)
    assert [r.output for r in requests] == [[20, 21, 22], [2, 3, 4], [25, 26, 27]]
    assert apart and min(apart) > 60


def outputs_of(driver, depth: int) -> list[list[int]]:
    """Prompts of several sizes and their decoding, sampled in every way, with steps issued ahead."""
    chance = Random(1)
    samplings = [SlotSampling(temperature=0.0), SlotSampling(temperature=0.8, top_k=20, seed=7, logprobs=2)]
    prompts = [[chance.randrange(3, 131) for _ in range(length)] for length in (6, 1)]
    requests = [driver.add(prompt, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
    driver.run_ahead(requests[:1], 2, depth)
    driver.run_ahead(requests, 3, depth)
    return [request.output for request in requests]


@devices
def test_tokens_are_those_of_copied_plans(
    device, library_products, tiny_model, make_gpu_driver, fused_sizes, monkeypatch
):
    _, folder = tiny_model("Qwen3", **fused_sizes | {"num_hidden_layers": 1})
    outputs = []
    for fetching in (False, True):
        monkeypatch.setattr(staging, "FETCHING", fetching)
        driver = make_gpu_driver(folder, device, padded=device == "cpu")
        outputs.append(outputs_of(driver, depth=2))
    assert outputs[0] == outputs[1]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_steps_of_every_bucket_issued_ahead_give_the_tokens_of_copied_plans(
    family, tiny_model, make_gpu_driver, fused_sizes, monkeypatch
):
    """Chunks, mixed and decode steps, log probabilities, captures between them, five steps in flight."""
    _, folder = tiny_model(family, **fused_sizes)
    outputs = []
    for fetching in (False, True):
        monkeypatch.setattr(staging, "FETCHING", fetching)
        driver = make_gpu_driver(folder, "cuda", block_count=BLOCKS)
        driver.forward = SimpleNamespace(failing=False)
        traffic = Traffic(driver, seed=5, depth=LANE_COUNT - 2)
        traffic.run(250)
        outputs.append([request.output for request in traffic.everybody])
    assert outputs[0] == outputs[1] and sum(map(len, outputs[0])) > 200


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
def test_a_step_is_nothing_but_its_graph(make_counting):
    """Of decoding: no copy to the card or from it, and one launch."""
    from torch.profiler import ProfilerActivity, profile

    driver = make_counting("cuda")
    request = driver.add([5])
    in_flight = [driver.runner.execute(driver.plan([(request, 1)]))]
    request.tokens.append(6)
    in_flight.append(driver.runner.execute(driver.plan([(request, 1)])))
    for step in in_flight:
        step.result()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for count in range(20):
            request.tokens.append(7 + count)
            result = driver.runner.execute(driver.plan([(request, 1)])).result()
            assert list(result.token_ids) == [8 + count]
    calls = {event.key: event.count for event in profiled.key_averages()}
    assert not [name for name in calls if name.startswith(("Memcpy", "cudaMemcpy"))], calls
    assert calls["cudaGraphLaunch"] == 20
    assert not [name for name in calls if name.startswith(("cudaLaunchKernel", "cuLaunchKernel"))], calls
