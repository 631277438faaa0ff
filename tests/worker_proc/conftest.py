"""Helpers for model tests: tiny random models saved by transformers, and a runner over a hostile paged cache."""

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
import torch
import transformers

from common.config import StepLimits
from common.messages import (
    NewSlots,
    SlotInit,
    SlotSampling,
    StepPlan,
    StepResult,
    TokenLogprobs,
    decode_for_worker,
    decode_from_worker,
)
from tests.support.poison import poison
from worker_proc.kv_cache import KVCache, cache_specs
from worker_proc.loader import load_model
from worker_proc.runner import CpuRunner

TINY = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


@pytest.fixture
def tiny_model(tmp_path):
    """make(family, **overrides) -> (the transformers model in float32, the folder it is saved in)."""

    def make(family: str, **overrides) -> tuple[transformers.PreTrainedModel, Path]:
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**{**TINY, "tie_word_embeddings": False, **overrides})
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight") or name.endswith(".bias"):
                    parameter.uniform_(0.5, 1.5)
        model.save_pretrained(tmp_path)
        return model, tmp_path

    return make


@dataclass
class DrivenRequest:
    """One request of a `PlanDriver`: its tokens so far and what came back for it."""

    slot: int
    tokens: list[int]
    prompt_count: int
    sampling: SlotSampling
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    embedding: "array[float] | None" = None
    started: bool = False

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_count :]


def masked_ids(length: int) -> list[int]:
    """What a masked request of that many tokens may sample next: each time another few ids."""
    return sorted(Random(length).sample(range(TINY["vocab_size"]), 9))


def mask_of(token_ids: list[int]) -> bytes:
    """As `StepPlan.masks` has it."""
    return sum(1 << token_id for token_id in token_ids).to_bytes(-(-TINY["vocab_size"] // 32) * 4, "little")


class PlanDriver:
    """A scheduler for tests: gives requests slots and shuffled blocks, and runs the plans that a test asks for."""

    def __init__(self, execute, slot_count: int, block_count: int, block_size: int, seed: int = 3) -> None:
        self._execute, self._block_size = execute, block_size
        self._free_blocks = list(range(block_count))
        self._free_slots = list(range(slot_count))
        Random(seed).shuffle(self._free_blocks)
        Random(seed).shuffle(self._free_slots)
        self._cleared: list[int] = []
        self._step_id = 0

    def add(self, tokens: list[int], sampling: SlotSampling | None = None, prompt_count: int = 0) -> DrivenRequest:
        """A request that has computed nothing; a test may give it whole blocks of another's and say how many tokens."""
        greedy = SlotSampling(temperature=0.0)
        return DrivenRequest(self._free_slots.pop(), list(tokens), prompt_count or len(tokens), sampling or greedy)

    def remove(self, request: DrivenRequest) -> None:
        """The next plan clears the slot."""
        self._cleared.append(request.slot)
        self._free_slots.insert(0, request.slot)
        self._free_blocks[:0] = request.blocks

    def plan(self, rows: list[tuple[DrivenRequest, int]]) -> StepPlan:
        """One step in which each request computes that many tokens."""
        decodes = [
            r for r, _ in rows if r.started and r.computed + 1 == len(r.tokens) and not r.sampling.pooling
        ]  # fmt: skip
        chunks = [(request, count) for request, count in rows if request not in decodes]
        decode_blocks = [self._append(request, 1) for request in decodes]
        chunk_blocks = [self._append(request, count) for request, count in chunks]
        self._step_id += 1
        self._sampled = [*decodes, *(r for r, count in chunks if r.computed + count == len(r.tokens))]
        masked = [request for request in self._sampled if request.sampling.masked]
        cleared, self._cleared = self._cleared, []
        plan = StepPlan(
            step_id=self._step_id,
            decode_slots=array("H", [request.slot for request in decodes]),
            decode_block_counts=array("B", map(len, decode_blocks)) if any(decode_blocks) else array("B"),
            chunk_slots=array("H", [request.slot for request, _ in chunks]),
            chunk_token_counts=array("i", [count for _, count in chunks]),
            chunk_samples=array("B", [r.computed + count == len(r.tokens) for r, count in chunks]),
            chunk_block_counts=array("i", map(len, chunk_blocks)),
            block_ids=array("i", [block for blocks in decode_blocks + chunk_blocks for block in blocks]),
            new_slots=NewSlots.of(*(self._init(request) for request, _ in chunks if not request.started)),
            cleared_slots=array("H", cleared),
            mask_slots=array("H", [request.slot for request in masked]),
            masks=tuple(mask_of(masked_ids(len(request.tokens))) for request in masked),
        )
        for request, count in [*((request, 1) for request in decodes), *chunks]:
            request.computed += count
            request.started = True
        return plan

    def step(self, rows: list[tuple[DrivenRequest, int]]) -> StepResult:
        """Run one plan over the wire's bytes and hand its tokens to their requests."""
        plan = decode_for_worker(self.plan(rows).to_wire())
        result = decode_from_worker(self._execute(plan).to_wire())
        assert result.step_id == self._step_id
        assert len(result.token_ids) == len(self._sampled)
        for request, token in zip(self._sampled, result.token_ids, strict=True):
            request.tokens.append(token)
        for entry in result.logprobs:
            self._sampled[entry.row_index].logprobs.append(entry)
        slots = {request.slot: request for request, _ in rows}
        for slot, entries in result.prompt_logprobs:
            slots[slot].prompt_logprobs.extend(entries)
        for slot, embedding in result.embeddings:
            assert slots[slot].embedding is None, "a second embedding"
            slots[slot].embedding = embedding
        return result

    def run(self, requests: list[DrivenRequest], token_count: int, chunk: int = 1 << 20) -> None:
        """All requests side by side, prompts in chunks, until each has that many output tokens."""
        while rows := [r for r in requests if len(r.output) < token_count]:
            self.step([(r, min(chunk, len(r.tokens) - r.computed)) for r in rows])

    def run_ahead(self, requests: list[DrivenRequest], token_count: int, depth: int) -> None:
        """Like `run` with whole prompts, but plans are made `depth` steps before the results they depend on."""
        in_flight = []
        while rows := [r for r in requests if len(r.output) < token_count]:
            plan = self.plan([(r, len(r.tokens) - r.computed) for r in rows])
            places = [(request, len(request.tokens)) for request in self._sampled]
            for request in self._sampled:
                request.tokens.append(-1)
            in_flight.append((places, self._execute(plan)))
            if len(in_flight) > depth:
                self._settle(*in_flight.pop(0))
        for step in in_flight:
            self._settle(*step)

    def _settle(self, places: list[tuple[DrivenRequest, int]], result: StepResult) -> None:
        for (request, place), token in zip(places, result.token_ids, strict=True):
            request.tokens[place] = token

    def _append(self, request: DrivenRequest, count: int) -> list[int]:
        needed = -(-(request.computed + count) // self._block_size) - len(request.blocks)
        appended = [self._free_blocks.pop() for _ in range(needed)]
        request.blocks += appended
        return appended

    def _init(self, request: DrivenRequest) -> SlotInit:
        return SlotInit(
            slot=request.slot,
            token_ids=array("i", request.tokens),
            prompt_count=request.prompt_count,
            computed_count=request.computed,
            block_ids=array("i", request.blocks[: request.computed // self._block_size]),
            sampling=request.sampling,
        )


def gpu_runner(model, cache: KVCache, limits: StepLimits, max_model_len: int, vocab: int):
    """The GPU's runner, with the fused forward pass where that covers the model."""
    from worker_proc.cuda.covered_models import unsupported_reason
    from worker_proc.cuda.fused_forward import FusedForward
    from worker_proc.cuda.plain_forward import PlainForward
    from worker_proc.cuda.runner import CudaRunner
    from worker_proc.cuda.slots import DeviceSlots

    device = cache.key_caches[0].device
    slots = DeviceSlots(limits.max_num_seqs, max_model_len, cache.block_size, model.config.vocab_size, device)
    forward = PlainForward(model)
    if unsupported_reason(model) is None:
        forward = FusedForward(
            model, max_rows=limits.max_num_seqs, max_tokens=limits.max_num_batched_tokens,
            max_positions=max_model_len + 16,
        )  # fmt: skip
    return CudaRunner(forward, cache, slots, limits, vocab, eager=False)


@pytest.fixture
def make_driver():
    """make(folder or model, ...) -> a PlanDriver over a fresh runner whose cache holds NaN where nothing was written.

    With `kernels` it is the GPU's runner, without a GPU in Triton's interpreter.
    """

    def make(
        folder, *, slot_count=8, block_count=96, block_size=4, vocab=131, max_model_len=200, token_limit=256,
        kernels=False, kv_cache_dtype="auto", deterministic=False, dtype=torch.float32,
    ):  # fmt: skip
        device = torch.device("cuda" if kernels and torch.cuda.is_available() else "cpu")
        model = load_model(folder, device=device, dtype=dtype) if isinstance(folder, Path) else folder
        specs = cache_specs(model.config, dtype, kv_cache_dtype)
        cache = KVCache(specs, block_size=block_size, block_count=block_count, host_block_count=4, device=device)
        poison(cache)
        limits = StepLimits(slot_count, token_limit)
        if kernels:
            runner = gpu_runner(model, cache, limits, max_model_len, vocab)
        else:
            runner = CpuRunner(model, cache, limits, max_model_len, vocab, deterministic=deterministic)
        driver = PlanDriver(lambda plan: runner.execute(plan).result(), slot_count, block_count, block_size)
        driver.runner, driver.cache = runner, cache
        return driver

    return make


@pytest.fixture(name="masked_ids")
def masked_ids_fixture():
    """The function `masked_ids`."""
    return masked_ids


@pytest.fixture
def reference_embedding():
    """reference_embedding(transformers model, token ids, pooling) -> float32 [hidden_size], of length 1."""

    def embed(model, ids: list[int], pooling: str) -> torch.Tensor:
        with torch.no_grad():
            hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].float()
        pooled = {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[pooling]
        return torch.nn.functional.normalize(pooled, dim=0)

    return embed


@pytest.fixture
def plan_driver():
    """The class PlanDriver, for tests that execute plans in their own way."""
    return PlanDriver


@pytest.fixture
def reference_tokens():
    """reference_tokens(transformers model, token ids, count) -> its greedy continuation."""

    def generate(model, ids: list[int], count: int) -> list[int]:
        output = model.generate(
            torch.tensor([ids]), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0,
            attention_mask=torch.ones(1, len(ids), dtype=torch.long), eos_token_id=None,
        )  # fmt: skip
        return output[0, len(ids) :].tolist()

    return generate
