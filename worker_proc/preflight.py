"""The worker's part of `launch.py check`: device, model, weights and cache, by what `worker_proc.engine` starts with.

A process of its own, `python -m worker_proc.preflight --config FILE --scratch DIR`, because it loads torch; the last
line of stdout is its findings. No weight is read, only the names and shapes in the files, which are held against a
model on torch's device `meta`. Starts and fetches nothing, and leaves nothing but in DIR.
"""

import argparse
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import setproctitle
import torch

from common.child import watch_supervisor
from common.config import EngineConfig, step_limits, with_changes
from common.findings import MAY_BE_FETCHED, Findings, size_text
from common.model_cache import is_hub_id
from common.processors import granted_cores
from worker_proc.engine import check_options, choose_device
from worker_proc.fetch_model import find_model
from worker_proc.kv_cache import (
    CacheSize,
    LayerCacheSpec,
    cache_specs,
    check_cache_dtype,
    choose_size,
    gpu_share_bytes,
    length_is_cut,
    wanted_length,
)
from worker_proc.loader import Checkpoint, build_model, check_fits, open_checkpoint, resolve_dtype
from worker_proc.model_config import read_model_config
from worker_proc.models.llama import LlamaForCausalLM
from worker_proc.slots import SlotMemory
from worker_proc.vocabulary import tokenizer_vocab_size

META = torch.device("meta")


@dataclass(frozen=True)
class Card:
    """A GPU, as far as it matters here."""

    name: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m worker_proc.preflight", description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, type=Path, help="JSON file with the whole configuration")
    parser.add_argument("--scratch", required=True, type=Path, help="folder for what must be converted to be looked at")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # what is logged at start is among the findings
    config = EngineConfig.from_json(options.config.read_text())
    print(Preflight(config, options.scratch).run().to_json())
    return 0


def card_of(device: torch.device) -> Card | None:
    """The GPU that would be used; None for a CPU."""
    if device.type == "cpu":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return Card(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), free, total)


def available_host_bytes() -> int:
    """Memory that this machine could give a process now; 0 where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


class Preflight:
    """One look at everything that the worker would refuse, and at what it would serve with.

    Args:
        config: complete but for those folders that are not at hand.
        scratch: a folder for conversions.
    """

    def __init__(self, config: EngineConfig, scratch: Path) -> None:
        self.found = Findings()
        self._config, self._scratch = config, scratch
        self._device: torch.device | None = None
        self._card: Card | None = None

    def run(self) -> Findings:
        """Look; the findings, with the folders of model and tokenizer among their values."""
        with self.found.refusals("device"):
            device = choose_device(self._config.model.device)
            self._card, self._device = card_of(device), device
            self._describe_device()
        with self.found.refusals("limits"):
            if self._device:
                check_options(self._config, self._device)
        with self.found.refusals("model"):
            self._find_folders()
            if self._config.model_dir:
                self._look_at_model()
        return self.found

    def _describe_device(self) -> None:
        if card := self._card:
            major, minor = card.capability
            memory = f"{size_text(card.free_bytes)} of {size_text(card.total_bytes)} free"
            self.found.ok("device", f"{card.name}, compute capability {major}.{minor}, {memory}",
                          free_bytes=card.free_bytes, total_bytes=card.total_bytes)  # fmt: skip
            return
        available = available_host_bytes()
        text = f"CPU, {granted_cores():g} cores" + (
            f", {size_text(available)} of memory available" if available else ""
        )
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == "" or self._config.model.device == "cpu"
        if Path("/dev/nvidia0").exists() and not hidden:
            built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs"
            self.found.warn("device", f"{text}; an NVIDIA GPU is here, but this torch ({built}) cannot use it")
        else:
            self.found.ok("device", text, available_bytes=available)

    def _find_folders(self) -> None:
        """Those of model and tokenizer that are on this machine; what would be fetched is only named."""
        options, config = self._config.model, self._config
        model_dir = config.model_dir or find_model(options.model, self._scratch, revision=options.revision)
        tokenizer_dir = config.tokenizer_dir
        if not tokenizer_dir:
            named = options.tokenizer
            tokenizer_dir = find_model(named, self._scratch, tokenizer_only=True) if named else model_dir
        for what, name, folder in (
            ("model", options.model, model_dir),
            ("tokenizer", options.tokenizer, tokenizer_dir),
        ):
            if name and not folder:
                self.found.warn(what, f"{name} is yet to be made ready, which serve does first; it was not looked at")
        self.found.values |= {"model_dir": str(model_dir or ""), "tokenizer_dir": str(tokenizer_dir or "")}
        self._config = with_changes(config, **self.found.values)

    def _look_at_model(self) -> None:
        """Configuration, weights and vocabulary, and what they need of the device."""
        config, folder = self._config, Path(self._config.model_dir)
        model_config = read_model_config(folder)
        heads = f"{model_config.head_count} heads, {model_config.kv_head_count} KV heads of {model_config.head_dim}"
        where = config.model.model if folder.parent == self._scratch else folder
        self.found.ok("model", f"{model_config.architecture}, {model_config.layer_count} layers, {heads}; {where}")
        dtype = resolve_dtype(config.model.dtype, model_config, self._device or torch.device("cpu"))
        model = build_model(model_config, META, dtype)
        self._look_at_weights(model)
        with self.found.refusals("vocabulary"):
            count = tokenizer_vocab_size(Path(config.tokenizer_dir or folder), model_config.vocab_size)
            self.found.ok("vocabulary", f"{count:,} token ids of the model's {model_config.vocab_size:,}")
        if self._device is None:
            return
        weight_bytes = sum(target.nbytes for target in model.checkpoint_targets().values())
        self._look_at_memory(weight_bytes, dtype)
        with self.found.refusals("forward pass"):
            self._look_at_forward_pass(model)
        with self.found.refusals("KV cache"):
            kind, capability = config.cache.kv_cache_dtype, self._card.capability if self._card else None
            check_cache_dtype(kind, model_config.head_dim, self._device, capability)
            self._look_at_cache(model, cache_specs(model_config, dtype, kind), weight_bytes)

    def _look_at_weights(self, model: LlamaForCausalLM) -> None:
        options, folder = self._config.model, Path(self._config.model_dir)
        if options.load_format == "dummy":
            self.found.ok("weights", "random ones, as --load-format dummy says")
            return
        found = Findings()
        with found.refusals("weights"):
            checkpoint = open_checkpoint(folder, options.load_format)
            check_fits(model, folder, checkpoint)
            self._describe_weights(found, checkpoint)
        if is_hub_id(options.model):
            found.soften(MAY_BE_FETCHED)
        self.found.extend(found)

    def _describe_weights(self, found: Findings, checkpoint: Checkpoint) -> None:
        count, size = len(checkpoint.file_paths), sum(path.stat().st_size for path in checkpoint.file_paths)
        files = "1 file" if count == 1 else f"{count} files"
        text = f"{len(checkpoint.names)} tensors in {files} of {size_text(size)}, all there and of the right shape"
        found.ok("weights", text, file_bytes=size)

    def _look_at_memory(self, weight_bytes: int, dtype: torch.dtype) -> None:
        """The weights against what is free: too little is the end on a GPU, and paging on a CPU."""
        room = self._card.free_bytes if self._card else available_host_bytes() or weight_bytes
        need = f"the weights take {size_text(weight_bytes)} in {str(dtype).removeprefix('torch.')}"
        if weight_bytes <= room:
            self.found.ok("memory", need, weight_bytes=weight_bytes)
            return
        where = "free on the GPU" if self._card else "available on this machine"
        advice = "take a smaller model" + (" or --dtype bfloat16" if dtype == torch.float32 else "")
        report = self.found.problem if self._card else self.found.warn
        report("memory", f"{need}, and {size_text(room)} are {where}; {advice}")

    def _look_at_forward_pass(self, model: LlamaForCausalLM) -> None:
        if not self._card:
            return
        from worker_proc.cuda.engine import not_fused  # brings Triton, as on a GPU the worker does

        if reason := not_fused(model, fixed_order=self._config.worker.deterministic):
            self.found.warn("forward pass", reason)
        else:
            self.found.ok("forward pass", "fused kernels cover this model")

    def _look_at_cache(self, model: LlamaForCausalLM, specs: list[LayerCacheSpec], weight_bytes: int) -> None:
        """Its size: exact on a CPU; on a GPU at most this, as what graphs and buffers take is measured at start."""
        config, limit = self._config, model.config.context_limit
        limits = step_limits(config.scheduler, self._card.name if self._card else "cpu")
        wanted = wanted_length(config.model.max_model_len, limit)
        available = config.cache.cpu_kv_cache_bytes
        if card := self._card:
            later = weight_bytes + self._slot_bytes(limits.max_num_seqs, wanted, model.config.vocab_size)
            available = gpu_share_bytes(config.cache.gpu_memory_utilization, card.free_bytes, card.total_bytes, later)
        size = choose_size(config, limits, specs, limit, available)
        if not self._card:  # for a card it was made above; it refuses sizes that its addresses cannot reach
            SlotMemory(limits.max_num_seqs, size.max_model_len, config.cache.block_size, META)
        self._describe_cache(size, specs[0], available)
        self._describe_length(size, limit)

    def _slot_bytes(self, slot_count: int, max_model_len: int, vocab_size: int) -> int:
        from worker_proc.cuda.slots import DeviceSlots

        slots = DeviceSlots(slot_count, max_model_len, self._config.cache.block_size, vocab_size, META)
        return slots.memory.nbytes + slots.sampling.counts.nbytes

    def _describe_cache(self, size: CacheSize, spec: LayerCacheSpec, available: int) -> None:
        block_size = self._config.cache.block_size
        tokens = size.block_count * block_size
        total_bytes = size.block_count * size.block_bytes
        if self._card and total_bytes > available:
            room = f"about {size_text(available)} are left for it on the GPU"
            self.found.problem("KV cache", f"--num-kv-blocks {size.block_count} takes {size_text(total_bytes)}; {room}")
            return
        element = str(spec.dtype).removeprefix("torch.")
        about = "up to " if self._card and not self._config.cache.num_kv_blocks else ""
        self.found.ok(
            "KV cache",
            f"{element}, {size.block_bytes // block_size:,} bytes a token; {about}{size.block_count:,} blocks of "
            f"{block_size}, {tokens:,} tokens, {size_text(total_bytes)}",
            block_count=size.block_count, block_bytes=size.block_bytes, token_count=tokens,
        )  # fmt: skip
        if size.host_block_count:
            host_bytes, room = size.host_block_count * size.block_bytes, available_host_bytes()
            text = f"{size.host_block_count:,} blocks, {size_text(host_bytes)} of the host's memory"
            enough = not room or host_bytes <= room
            report = self.found.ok if enough else self.found.warn
            report("swap space", text if enough else f"{text}, of which {size_text(room)} are available")

    def _describe_length(self, size: CacheSize, limit: int) -> None:
        text = f"{size.max_model_len:,} tokens a request, prompt and output"
        if cut := length_is_cut(self._config.model.max_model_len, limit):
            self.found.warn("length", cut, max_model_len=size.max_model_len)
        elif size.max_model_len < limit and not self._config.model.max_model_len:
            self.found.warn("length", f"{text}; the model allows {limit:,}, the cache holds no more",
                            max_model_len=size.max_model_len)  # fmt: skip
        else:
            self.found.ok("length", text, max_model_len=size.max_model_len)


if __name__ == "__main__":
    setproctitle.setproctitle("trireme-check")
    watch_supervisor()
    sys.exit(main())
