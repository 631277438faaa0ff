"""Fault D1's neighbour: an error in the middle of a graph's capture is told as what it is, and costs only itself."""

from collections import Counter, deque
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from kernels.step_layout import HEADER, PlanLayout
from worker_proc.cuda import step_program
from worker_proc.cuda.buckets import CHUNK, DECODE, MIXED, Bucket
from worker_proc.cuda.runner import MOST_PADDING, CudaRunner
from worker_proc.cuda.step_program import CaptureError, StepProgram

MESSAGE = (
    "the CUDA Graph of decode steps with 2 rows and 2 tokens cannot be captured: out of shared memory; "
    "--enforce-eager runs without graphs"
)
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU in this process")


class PretendedGraph:
    """Stands for torch.cuda.CUDAGraph; what is captured has run already."""

    captures = 0

    def replay(self) -> None:
        """Nothing to do."""


@contextmanager
def pretended_capture(graph, **_):
    """As torch.cuda.graph: a capture that an error ended raises another one when it is closed."""
    PretendedGraph.captures += 1
    try:
        yield
    except Exception as error:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture") from error


class RaisingKernel:
    """A forward pass whose kernel cannot be launched, as often as told, once its rehearsal is over."""

    capturable, fixed_order = True, False

    def __init__(self, forward, failures: int, fail=None) -> None:
        self._forward, self._failures, self._fail = forward, failures, fail

    def shortened(self):
        """The rehearsal runs the real pass."""
        return self._forward

    def run(self, *args) -> torch.Tensor:
        """The real pass, or an error."""
        if self._failures:
            self._failures -= 1
            if self._fail is not None:
                self._fail()
            raise RuntimeError("out of shared memory\nand a stack of lines")
        return self._forward.run(*args)


def failing_program(driver, fail=None):
    """The driver's program with a pass that fails once, in a call of `fail` if that is given."""
    program = driver.runner.program
    program._forward = RaisingKernel(program._forward, 1, fail)
    return program


def small_program() -> StepProgram:
    """One that uses graphs, wherever it runs."""
    program = StepProgram(
        SimpleNamespace(capturable=True), None, None, torch.zeros(64, dtype=torch.int32), PlanLayout(8, 1),
        max_tokens=16, vocabulary=8, eager=False,
    )  # fmt: skip
    program.uses_graphs = True
    return program


@pytest.fixture
def pretended_graphs(monkeypatch):
    """Graphs on a CPU: capturing one runs its step, replaying it does nothing."""
    PretendedGraph.captures = 0
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PretendedGraph)
    monkeypatch.setattr(torch.cuda, "graph", pretended_capture)


@interpreted
def test_a_failing_capture_names_the_step_the_reason_and_the_way_out(
    library_products, pretended_graphs, tiny_model, make_gpu_driver, fused_sizes
):
    _, folder = tiny_model("Llama", **fused_sizes)
    program = failing_program(make_gpu_driver(folder, "cpu"))
    program.uses_graphs = True
    with torch.inference_mode():
        with pytest.raises(CaptureError) as caught:
            program.prepare(Bucket(DECODE, 2, 2))
        assert str(caught.value) == MESSAGE
        assert str(caught.value.__cause__).startswith("out of shared memory")
        assert program.graph_count == 0, "a broken graph was kept"
        program.prepare(Bucket(DECODE, 2, 2))
    assert (program.graph_count, PretendedGraph.captures) == (1, 2)


def test_a_capture_that_cannot_be_ended_costs_neither_the_stream_nor_the_memory_pool(pretended_graphs, monkeypatch):
    """Torch then leaves its own stream in place, and its allocator takes the capture for one that goes on."""
    program = small_program()
    logits, failing = torch.empty(0), iter((True, False))

    def run(*_):
        if next(failing):
            raise RuntimeError("out of shared memory")
        return logits

    monkeypatch.setattr(program, "rehearse", lambda _: None)
    monkeypatch.setattr(program, "_run", run)
    ours, streams, pools, ended = SimpleNamespace(device_index=0), [], [], []
    streams.append(ours)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    monkeypatch.setattr(torch.cuda.memory, "_cuda_endAllocateToPool", lambda *pool: ended.append(pool))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "another pool")

    def capture(graph, pool, **options):
        pools.append(pool)
        streams.append("torch's")
        return pretended_capture(graph, **options)

    monkeypatch.setattr(torch.cuda, "graph", capture)
    program._pool = "a pool"
    with pytest.raises(CaptureError):
        program.prepare(Bucket(DECODE, 2, 2))
    assert streams == [ours, "torch's", ours] and ended == [(0, "a pool")]
    program.prepare(Bucket(DECODE, 2, 2))
    assert pools == ["a pool", "another pool"] and program.graph_count == 1


def test_a_bucket_whose_capture_failed_in_a_step_is_not_tried_again_in_a_pause(pretended_graphs, monkeypatch):
    """It had been queued for the pause before; that it failed there too ended the preparation of all others."""
    program = small_program()
    failing, other = Bucket(CHUNK, 1, 16), Bucket(CHUNK, 2, 16)
    rehearsed = []

    def rehearse(bucket: Bucket) -> None:
        rehearsed.append(bucket)
        if bucket == failing:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(program, "rehearse", rehearse)
    monkeypatch.setattr(program, "_run", lambda *_: torch.empty(0))
    runner = CudaRunner.__new__(CudaRunner)
    runner.program, runner._unprepared, runner._behind = program, deque([failing, other]), None
    program.run(failing)
    assert runner._prepare_next() and not runner._prepare_next()
    assert rehearsed == [failing, other] and program.has_graph(other)


def test_no_more_graphs_are_kept_than_memory_is_set_aside_for(pretended_graphs, monkeypatch):
    monkeypatch.setattr(step_program, "GRAPH_LIMIT", 2)
    program, ran = small_program(), []
    monkeypatch.setattr(program, "rehearse", lambda _: None)
    monkeypatch.setattr(program, "_run", lambda _, bucket, sampling: ran.append(bucket.rows) or torch.empty(0))
    for rows in (1, 2, 4, 1, 4):
        program.run(Bucket(DECODE, rows, rows))
    assert ran == [1, 2, 4, 4], "two are captured and replayed, the third runs each time"
    assert (program.graph_count, PretendedGraph.captures) == (2, 2)


def test_a_rehearsal_sees_an_empty_plan_and_leaves_the_real_one(monkeypatch):
    """The whole header is empty: a rehearsal has no rows, and no writes to slots either."""
    plan = torch.arange(1, 65, dtype=torch.int32)
    forward = SimpleNamespace(capturable=True, shortened=lambda: "a short pass")
    program = StepProgram(forward, None, None, plan, PlanLayout(8, 1), max_tokens=16, vocabulary=8, eager=False)
    seen = []
    monkeypatch.setattr(program, "_run", lambda forward, *_, **__: seen.append((forward, plan.tolist())))
    program.rehearse(Bucket(DECODE, 2, 2))
    assert seen == [("a short pass", [0] * HEADER + list(range(HEADER + 1, 65)))]
    assert plan.tolist() == list(range(1, 65))


def bare_runner(*captured: Bucket):
    """A runner and its program with these graphs, as far as choosing a bucket asks."""
    program = StepProgram.__new__(StepProgram)
    program._graphs, program._without_graph = {(bucket, True): None for bucket in captured}, set()
    runner = CudaRunner.__new__(CudaRunner)
    runner.pads_steps, runner.program, runner._behind, runner._may_end_in_rows = True, program, None, True
    runner._padding, runner._unprepared = Counter(), deque()
    runner._limits = SimpleNamespace(max_num_seqs=256, max_num_batched_tokens=8192)
    return runner, program


def chosen(runner, rows: int, tokens: int, prompt_rows: tuple = ()) -> Bucket:
    """What a step of so many chunks runs in."""
    packed = SimpleNamespace(
        decode_row_count=0, row_count=rows, token_count=tokens, prompt_rows=prompt_rows, pooled_rows=()
    )
    return runner._bucket(packed)


def test_a_larger_bucket_stands_in_for_one_without_a_graph(monkeypatch):
    """In `b256_128_256` steps of sizes that came for the first time waited 30 ms each for their captures."""
    near, far = Bucket(CHUNK, 16, 1280), Bucket(CHUNK, 256, 2048)
    runner, program = bare_runner(near, far, Bucket(MIXED, 64, 1536))
    program._graphs[Bucket(CHUNK, 64, 1536), False] = None
    assert chosen(runner, 10, 1250) == near and chosen(runner, 1, 4000) == Bucket(CHUNK, 4, 4096), "nothing holds it"
    assert chosen(runner, 10, 1000) == near, "the least padding of its kind"
    assert chosen(runner, 40, 1500) == far, "room for its rows, captured with sampling"
    own = [Bucket(CHUNK, 64, 1536), Bucket(CHUNK, 16, 1024)]
    assert list(runner._unprepared) == own, "the last one that came is captured first"
    each = 256 - 64 + 2048 - 1536
    for _ in range(MOST_PADDING // each):
        assert chosen(runner, 40, 1500) == far
    assert chosen(runner, 40, 1500) == own[0], "padding has cost as much as its capture"
    assert list(runner._unprepared) == own, "and waits once"
    program._without_graph.add(own[0])
    assert chosen(runner, 40, 1500) == far, "without a graph of its own it would take longer than with padding"
    program._without_graph.clear()
    monkeypatch.setattr(step_program, "GRAPH_LIMIT", len(program._graphs))
    assert chosen(runner, 40, 1500) == far, "there is no room for another graph"


def test_however_much_is_padded_the_first_step_of_a_size_waits_for_no_capture():
    largest = Bucket(CHUNK, 256, 8192)
    runner, _ = bare_runner(largest)
    assert chosen(runner, 1, 100) == largest and chosen(runner, 1, 100) == Bucket(CHUNK, 1, 128)


def test_a_graph_that_ends_in_rows_stands_in_for_no_step_that_asks_for_every_token():
    """Nor the other way about: one computes too little, the other too much."""
    plain, asking = Bucket(CHUNK, 256, 8192), Bucket(CHUNK, 16, 2560, every_token=True)
    runner, program = bare_runner(plain)
    assert chosen(runner, 1, 2500, ("a prompt's",)) == asking, "which nothing holds"
    assert not runner._unprepared
    program._graphs[asking, True] = None
    assert chosen(runner, 1, 2000, ("a prompt's",)) == asking and chosen(runner, 1, 2000) == plain
    assert list(runner._unprepared) == [Bucket(CHUNK, 16, 2048), Bucket(CHUNK, 16, 2048, every_token=True)]


def test_nothing_is_captured_before_its_kernels_are_compiled(monkeypatch):
    """The worker would compile them itself, for seconds, in a step or a pause."""
    largest, kernels, prepared = Bucket(CHUNK, 256, 8192), [], []
    runner, program = bare_runner(largest)
    runner._behind = SimpleNamespace(ready=lambda: bool(kernels))
    monkeypatch.setattr(program, "prepare", prepared.append)
    assert [chosen(runner, 1, 100) for _ in range(3)] == [largest] * 3
    assert runner.prepare_next() and runner.prepare_next() and prepared == [] and runner.unprepared_count == 1
    assert chosen(runner, 1, 100, ("a prompt's",)) == largest._replace(every_token=True), "whose kernels are there"
    kernels.append("compiled")
    assert chosen(runner, 1, 100) == Bucket(CHUNK, 1, 128)
    assert not runner.prepare_next() and prepared == [Bucket(CHUNK, 1, 128)] and runner.unprepared_count == 0


class BrokenRehearsal:
    """A forward pass that cannot be rehearsed, and so never captured; it computes all the same."""

    capturable, fixed_order = True, False

    def __init__(self, forward) -> None:
        self._forward = forward

    def shortened(self):
        """The rehearsal's pass."""
        return self

    def run(self, bucket, inputs, cache, slots, counts) -> torch.Tensor:
        """The real pass; an error on a rehearsal's empty plan."""
        if not counts.any():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._forward.run(bucket, inputs, cache, slots, counts)


@interpreted
def test_steps_whose_graph_cannot_be_captured_run_without_one(
    library_products, pretended_graphs, tiny_model, make_gpu_driver, fused_sizes, reference_tokens, caplog
):
    """The worker ended in the middle of somebody's answer; and the rehearsal left an empty plan in the buffer."""
    reference, folder = tiny_model("Llama", **fused_sizes)
    driver = make_gpu_driver(folder, "cpu")
    program = driver.runner.program
    program._forward, program.uses_graphs = BrokenRehearsal(program._forward), True
    request = driver.add([5, 9, 77, 30])
    driver.run([request], 4)
    assert request.output == reference_tokens(reference, [5, 9, 77, 30], 4)
    assert PretendedGraph.captures == program.graph_count == 0
    told = [record.getMessage() for record in caplog.records if "cannot be captured" in record.getMessage()]
    assert len(told) == 2, "once for the prompt's step, once for the three others"


@interpreted
def test_an_error_while_there_is_nothing_to_do_ends_the_preparation_and_not_the_worker(
    library_products, pretended_graphs, tiny_model, make_gpu_driver, fused_sizes, reference_tokens, caplog
):
    reference, folder = tiny_model("Llama", **fused_sizes)
    driver = make_gpu_driver(folder, "cpu")
    runner, program = driver.runner, failing_program(driver)
    program.uses_graphs = True
    left = len(runner._unprepared) - 1
    assert not runner.prepare_next() and not runner.prepare_next()
    assert [record.getMessage() for record in caplog.records] == [
        f"steps are not prepared any more ({left} were left): {MESSAGE.replace('2', '1')}"
    ]
    program.uses_graphs = False
    request = driver.add([5, 9, 77, 30])
    driver.run([request], 2)
    assert request.output == reference_tokens(reference, [5, 9, 77, 30], 2)


@interpreted
def test_graphs_that_fail_at_the_start_end_the_start(
    library_products, pretended_graphs, tiny_model, make_gpu_driver, fused_sizes
):
    _, folder = tiny_model("Llama", **fused_sizes)
    driver = make_gpu_driver(folder, "cpu")
    program = driver.runner.program
    program._forward, program.uses_graphs = BrokenRehearsal(program._forward), True
    with pytest.raises(CaptureError, match="--enforce-eager runs without graphs"):
        driver.runner.warm_up()


def wait_for_the_device() -> None:
    """What invalidates a capture: ending it fails too."""
    torch.cuda.synchronize()
    raise AssertionError("nothing was being captured")


@pytest.mark.gpu
@pytest.mark.parametrize("fail", [None, wait_for_the_device], ids=["raising", "invalid"])
def test_after_a_failed_capture_the_device_still_computes(
    fail, tiny_model, make_gpu_driver, fused_sizes, reference_tokens
):
    reference, folder = tiny_model("Llama", **fused_sizes)
    driver = make_gpu_driver(folder, "cuda")
    program, stream = failing_program(driver, fail), torch.cuda.current_stream()
    with torch.inference_mode(), pytest.raises(CaptureError) as caught:
        program.prepare(Bucket(DECODE, 2, 2))
    assert str(caught.value) == MESSAGE if fail is None else "captured: CUDA error" in str(caught.value)
    assert torch.cuda.current_stream() == stream
    request = driver.add([5, 9, 77, 30])
    driver.run([request], 6)
    assert request.output == reference_tokens(reference, [5, 9, 77, 30], 6)
    assert program.graph_count == 2, "of the prompt's step and of the others"
