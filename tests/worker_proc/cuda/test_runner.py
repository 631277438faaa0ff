"""The GPU's runner with the fused pass: transformers' tokens, whatever the padding, neighbours and run-ahead."""

import queue
import threading
from random import Random

import pytest
import torch

from common.messages import SlotSampling, StepPlan
from kernels import fused_decode_attention as fused
from kernels import skinny_linear, skinny_linear_warps, tuning
from kernels.gemm import project_heads_reference
from kernels.tuning import LinearPlan
from tests.kernels.gluon_emulator import emulate
from worker_proc.cuda import fused_forward
from worker_proc.cuda.lanes import LANE_COUNT

LONG = 20_000_000
"""Cycles, about 10 ms: longer than it takes to issue as many steps as there are lanes."""
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU in this process")
devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)


def prompt(count: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(3, 131) for _ in range(count)]


@devices
@pytest.mark.parametrize(("family", "extra"), [("Llama", {}), ("Qwen2", {}), ("Mistral", {"sliding_window": 6})])
def test_greedy_batch_equals_transformers(
    device, family, extra, tiny_model, make_gpu_driver, fused_sizes, reference_tokens, request
):
    if family != "Llama":
        request.getfixturevalue("library_products")
    reference, folder = tiny_model(family, **fused_sizes, **extra)
    driver = make_gpu_driver(folder, device)
    requests = [driver.add(prompt(length, seed=length)) for length in (1, 9)]
    driver.run(requests, 2, chunk=6)
    for sample in requests:
        ids = sample.tokens[: sample.prompt_count]
        assert sample.output == reference_tokens(reference, ids, 2), f"prompt of {len(ids)}"


def pretend_measured(monkeypatch, plan_of) -> None:
    """Let `plan_of` say which plan the table has for an operation."""
    monkeypatch.setattr(tuning, "measured_plan", lambda *key: plan_of(key[3]))
    monkeypatch.setattr(skinny_linear, "measured_plan", tuning.measured_plan)


def hopper_plan(operation: str) -> LinearPlan | None:
    """Tiles small enough for the tiny models; W waits in shared memory."""
    inputs, in_parts = int(operation.split("_")[1][1:]), operation.endswith("_parts")
    if inputs % 64:
        return LinearPlan("small_m", 16, 16, 4, 2) if in_parts else None
    plan = LinearPlan("resident", 16, 64, 4, num_stages=2, split_k=inputs // 64 if in_parts else 1, block_m=64)
    return plan if in_parts or operation.endswith("_silu") else None


@devices
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_products_in_parts_give_the_same_tokens(
    device, family, tiny_model, make_gpu_driver, fused_sizes, reference_tokens, monkeypatch
):
    """Where a card's table has plans that leave parts: chunks and mixed steps, and decode rows that are not fused."""
    plan = LinearPlan("small_m", block_n=64, block_k=32, num_stages=2, split_k=2)
    pretend_measured(monkeypatch, lambda operation: plan if operation.endswith("_parts") else None)
    monkeypatch.setattr(fused_forward, "FEWEST_PARTS_TOKENS", 1)
    monkeypatch.setattr(fused_forward.FusedForward, "_is_fused", lambda *_: False)
    products, layers, run = [], [], fused_forward.FusedForward.run
    monkeypatch.setattr(fused_forward, "linear_parts", lambda *a: products.append(a) or skinny_linear.linear_parts(*a))
    monkeypatch.setattr(fused_forward.FusedForward, "run", lambda f, *a: layers.append(len(f._layers)) or run(f, *a))
    reference, folder = tiny_model(family, **fused_sizes)
    driver = make_gpu_driver(folder, device)
    requests = [driver.add(prompt(length, seed=length)) for length in (1, 6)]
    driver.run(requests, 2, chunk=4)
    assert len(products) == 3 * sum(layers) > 0, "of all passes: with graphs, one layer is rehearsed and all captured"
    for sample in requests:
        ids = sample.tokens[: sample.prompt_count]
        assert sample.output == reference_tokens(reference, ids, 2), f"prompt of {len(ids)}"


@interpreted
def test_one_rows_attention_is_merged_by_the_output_product(tiny_model, make_gpu_driver, fused_sizes, monkeypatch):
    """What float32 prefers to a chosen token it prefers by float16's error; several rows are merged as ever."""
    from worker_proc.loader import load_model

    emulate(monkeypatch, skinny_linear_warps, "_warps_kernel")
    plan = LinearPlan("warps", 16, 32, 1)
    pretend_measured(monkeypatch, lambda operation: None if operation.endswith("_parts") else plan)
    rows, attend, merging = [], fused.fused_decode_attention, fused_forward.linear_of_parts
    monkeypatch.setattr(fused, "fused_decode_attention", lambda *a, **k: rows.append(len(a[0])) or attend(*a, **k))
    merged = []
    monkeypatch.setattr(fused_forward, "linear_of_parts", lambda *a, **k: merged.append(1) or merging(*a, **k))
    _, folder = tiny_model("Qwen3", **fused_sizes, intermediate_size=96)
    driver = make_gpu_driver(folder, "cpu", dtype=torch.float16)
    planned, plan_rows = [], fused_forward.FusedForward._fused_plan
    monkeypatch.setattr(
        fused_forward.FusedForward, "_fused_plan", lambda pass_, *a: planned.append(a[0]) or plan_rows(pass_, *a)
    )
    requests = [driver.add(prompt(length, seed=length)) for length in (3, 9)]
    driver.run(requests, 3, chunk=16)
    driver.run(requests[:1], 5, chunk=16)
    assert len(merged) == rows.count(1) > 0 and rows.count(2) > 0
    assert planned == rows, "once for each launch; it was twice for one row"
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    for request in requests:
        logits = plain_logits(model, request.tokens[:-1])[request.prompt_count - 1 :]
        chosen = logits.gather(1, torch.tensor(request.output)[:, None])[:, 0]
        assert ((logits.max(dim=1).values - chosen) < 0.02 * logits.std()).all()


@interpreted
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_a_prompts_product_may_store_its_heads_itself(
    family, library_products, tiny_model, make_gpu_driver, fused_sizes, reference_tokens, monkeypatch
):
    """In steps with padding, of chunks and of decode rows beside them. The product itself is the reference's."""
    projected = []

    def project_heads(x, weight, heads, store, token_count=None):
        projected.append(x.shape[0])
        heads.copy_(project_heads_reference(x, weight, heads.shape[1], store))

    monkeypatch.setattr(fused_forward, "heads_plan", lambda weight, rows, *_: LinearPlan("gemm") if rows > 2 else None)
    monkeypatch.setattr(fused_forward, "project_heads", project_heads)
    reference, folder = tiny_model(family, **fused_sizes)
    driver = make_gpu_driver(folder, "cpu", padded=True)
    requests = [driver.add(prompt(length, seed=length)) for length in (1, 9)]
    driver.run(requests, 2, chunk=6)
    assert set(projected) == {16}, "the bucket of both steps with chunks"
    for sample in requests:
        assert sample.output == reference_tokens(reference, sample.tokens[: sample.prompt_count], 2)


@devices
def test_padded_steps_touch_nothing_else(device, library_products, tiny_model, make_gpu_driver, fused_sizes):
    """Faults F1 and F2: a padding row's slot -1 must not reach the last slot, nor its block the last block."""
    _, folder = tiny_model("Qwen3", **fused_sizes)
    outputs = []
    for padded in (False, True):
        driver = make_gpu_driver(folder, device, padded=padded, eager=not padded)
        slots, scratch = driver.runner.slots, driver.runner.slots.slot_count
        requests = [driver.add(prompt(length, seed=length)) for length in (3, 6, 2)]
        used = {request.slot for request in requests}
        (free,) = set(range(scratch)) - used
        before = slots.token_ids[[free, scratch]].clone(), slots.known_lengths[[free, scratch]].clone()
        driver.run(requests[:2], 1, chunk=4)
        driver.run(requests, 3, chunk=4)
        outputs.append([request.output for request in requests])
        assert torch.equal(slots.token_ids[[free, scratch]], before[0]), "padding wrote tokens"
        assert torch.equal(slots.known_lengths[[free, scratch]], before[1]), "padding grew a slot"
        held = {block for request in requests for block in request.blocks}
        unheld = [block for block in range(48) if block not in held]
        assert all(tensor[unheld].isnan().all() for tensor in driver.cache.tensors()), "a free block was written"
    assert outputs[0] == outputs[1]


@devices
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_quantised_caches_give_the_tokens_of_the_cpu(
    device, kv_cache_dtype, library_products, tiny_model, make_gpu_driver, make_driver, fused_sizes
):
    """The same float32 model over the same type of cache by the CPU's runner."""
    _, folder = tiny_model("Qwen3", **fused_sizes)
    outputs = []
    for driver in (make_gpu_driver(folder, device, kv_cache_dtype=kv_cache_dtype),
                   make_driver(folder, kv_cache_dtype=kv_cache_dtype)):  # fmt: skip
        requests = [driver.add(prompt(length, seed=length)) for length in (1, 10)]
        driver.run(requests, 3, chunk=7)
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1]


@devices
def test_run_ahead_gives_the_same_tokens(device, library_products, tiny_model, make_gpu_driver, fused_sizes):
    _, folder = tiny_model("Qwen3", **fused_sizes)
    sampling = SlotSampling(temperature=0.8, top_k=20, seed=7, repetition_penalty=1.2)
    outputs = []
    for depth in (0, 2):
        driver = make_gpu_driver(folder, device)
        requests = [driver.add(prompt(6), sampling), driver.add(prompt(3, seed=1))]
        driver.run_ahead(requests, 3, depth)
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1]


@pytest.mark.gpu
def test_plans_in_all_lanes_at_once_give_what_they_give_one_by_one(tiny_model, make_gpu_driver, fused_sizes):
    """The device is kept busy until all of them have been issued. Rows differ from step to step; prompts come later."""
    _, folder = tiny_model("Qwen3", **fused_sizes)
    sampling, outputs = SlotSampling(temperature=0.8, seed=7), []
    for in_flight in (1, LANE_COUNT):
        driver, rng, tokens = make_gpu_driver(folder, "cuda", block_count=96), Random(4), []
        requests = [driver.add(prompt(length, seed=length), sampling) for length in (3, 9, 5, 2)]
        for _ in range(10 * LANE_COUNT // in_flight):
            if in_flight > 1:
                torch.cuda._sleep(LONG)
            steps = [driver.issue(random_plan(driver, requests, rng)) for _ in range(in_flight)]
            tokens += [step.result().token_ids for step in steps]
        outputs.append(tokens)
    assert outputs[0] == outputs[1]
    assert len(set(map(len, outputs[0]))) > 2 and len({token for ids in outputs[0] for token in ids}) > 9


def random_plan(driver, requests, rng: Random) -> StepPlan:
    """Some of the requests, each with all that it has to compute; what they sample is not known yet."""
    rows = [request for request in requests if rng.random() < 0.5] or requests[:1]
    plan = driver.plan([(request, len(request.tokens) - request.computed) for request in rows])
    for request in rows:
        request.tokens.append(0)
    return plan


@pytest.mark.gpu
@pytest.mark.parametrize("plans", [None, hopper_plan])
def test_bfloat16_logits_are_close_to_float32(tiny_model, make_gpu_driver, fused_sizes, monkeypatch, plans):
    """By relative error, against the plain modules in float32 on the CPU."""
    from worker_proc.loader import load_model

    if plans is not None:
        pretend_measured(monkeypatch, plans)
    _, folder = tiny_model("Qwen3", **fused_sizes)
    ids = prompt(40)
    driver = make_gpu_driver(folder, "cuda", eager=True, dtype=torch.bfloat16)
    request = driver.add(ids)
    plan = driver.plan([(request, len(ids))])
    step = driver.issue(plan)
    step.result()
    fused = driver.runner.program.token_logits(0, len(ids)).float().cpu()
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    reference = plain_logits(model, ids)
    error = (fused - reference).norm() / reference.norm()
    assert error < 2e-2, f"relative error {error:.4f}"


@pytest.mark.gpu
def test_captured_steps_on_hopper_tiles_choose_as_float32_does(tiny_model, make_gpu_driver, fused_sizes, monkeypatch):
    """Chunks, mixed and decode steps in graphs: what float32 prefers to a chosen token it prefers by bf16's error."""
    from worker_proc.loader import load_model

    pretend_measured(monkeypatch, hopper_plan)
    _, folder = tiny_model("Qwen3", **fused_sizes)
    driver = make_gpu_driver(folder, "cuda", dtype=torch.bfloat16)
    requests = [driver.add(prompt(length, seed=length)) for length in (3, 20, 9)]
    driver.run(requests, 6, chunk=8)
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    for request in requests:
        logits = plain_logits(model, request.tokens[:-1])[request.prompt_count - 1 :]
        chosen = logits.gather(1, torch.tensor(request.output)[:, None])[:, 0]
        assert ((logits.max(dim=1).values - chosen) < 0.1 * logits.std()).all()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_prompts_that_read_their_own_keys_may_be_cut_anywhere(
    device, kv_cache_dtype, fresh_plans, tiny_model, make_gpu_driver, fused_sizes
):
    """Whole, in chunks beside another's decoding, and behind a prefix from the cache: the same choice, and bf16's error
    between the logits."""
    _, folder = tiny_model("Qwen3", **fused_sizes | {"head_dim": 128})
    ids, found = prompt(1100), {}
    driver = make_gpu_driver(
        folder, device, dtype=torch.bfloat16, kv_cache_dtype=kv_cache_dtype, block_count=300, block_size=16,
        step_tokens=1280, max_len=1280,
    )  # fmt: skip

    def last_chunk(name, request, count, *others):
        driver.step([*others, (request, count)])
        found[name] = driver.forward.logits[len(others)].clone(), request.output

    whole, chunked, behind, other = (driver.add(ids) for _ in range(4))
    last_chunk("whole", whole, 1100)
    driver.step([(other, 1100)])
    for count in (70, 500):
        driver.step([(other, 1), (chunked, count)])
    last_chunk("chunked", chunked, 530, (other, 1))
    behind.blocks, behind.computed = whole.blocks[:60], 960
    last_chunk("behind a prefix", behind, 140)
    assert fresh_plans and all(fresh_plans)
    logits, _ = found.pop("whole")
    for name, (others, output) in found.items():
        assert (others - logits).norm() < 2e-2 * logits.norm(), name
        assert logits.max() - logits[output[0]] < 0.1 * logits.std(), name


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
def test_steps_never_wait_for_the_device(tiny_model, make_gpu_driver, fused_sizes):
    """50 decode steps: no scalar is read, no stream is waited for on the issuing thread."""
    from torch.profiler import ProfilerActivity, profile

    _, folder = tiny_model("Qwen3", **fused_sizes)
    driver = make_gpu_driver(folder, "cuda")
    request = driver.add(prompt(4))
    driver.run([request], 4)
    plans = []
    for _ in range(50):
        plans.append(driver.plan([(request, 1)]))
        request.tokens.append(0)
    pending: queue.SimpleQueue = queue.SimpleQueue()
    reader = threading.Thread(target=lambda: [pending.get().result() for _ in plans])  # as the worker's reporter
    reader.start()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for plan in plans:
            pending.put(driver.issue(plan))
        reader.join()
    calls = {event.key: event.count for event in profiled.key_averages()}
    for name in ("aten::_local_scalar_dense", "cudaStreamSynchronize"):
        assert calls.get(name, 0) == 0, f"{name}: {calls[name]} calls in 50 steps"


def plain_logits(model, ids: list[int]) -> torch.Tensor:
    """Logits [len(ids), vocab] of a sequence by the plain modules, over a cache of its own."""
    from worker_proc.forward_context import ForwardContext

    config, count = model.config, len(ids)
    shape = (1, config.kv_head_count, 64, config.head_dim)
    context = ForwardContext(
        slot_mapping=torch.arange(count),
        row_slots=torch.zeros(1, dtype=torch.int32),
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        context_lengths=torch.tensor([count], dtype=torch.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        key_caches=[torch.zeros(shape) for _ in range(config.layer_count)],
        value_caches=[torch.zeros(shape) for _ in range(config.layer_count)],
        block_size=64,
        decode_row_count=0,
    )
    with torch.inference_mode():
        hidden = model(torch.tensor(ids, dtype=torch.int32), torch.arange(count, dtype=torch.int32), context)
        return model.compute_logits(hidden)
