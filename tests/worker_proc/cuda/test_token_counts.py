"""A pass in a bucket larger than its step: the products of many rows end with the step's tokens."""

import pytest
import torch

from kernels import gemm, gemm_hopper, tuning
from kernels.tuning import LinearPlan
from tests.kernels.gluon_emulator import emulate
from tests.kernels.test_gemm_hopper import RAGGED
from tests.worker_proc.cuda.conftest import store_by_reference
from tests.worker_proc.cuda.test_runner import interpreted, prompt
from worker_proc.cuda import fused_forward, runner
from worker_proc.cuda.buckets import CHUNK, MIXED, Bucket
from worker_proc.cuda.fused_forward import FusedForward

SIZES = {
    "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 128,
    "num_hidden_layers": 1,
}  # fmt: skip
"""All columns are multiples of a tile's."""

TILE_ROWS, BUCKET_TOKENS = gemm_hopper.TILE_M, gemm_hopper.TILE_M + 2


def poison_buffers(forward: FusedForward) -> list[torch.Tensor]:
    """Put NaN in what a pass leaves behind, and 3 in rows after a norm, of which a product would be a number; returns
    the rows past the first tile of what products write."""
    written = [forward._query, forward._qkv, forward._activated]
    for buffer in (*written, forward.hidden, forward._attended):
        buffer.fill_(float("nan"))
    forward._workspace.normed.fill_(3)
    return [buffer[TILE_ROWS:] for buffer in written]


@interpreted
@pytest.mark.parametrize(("stores_heads", "kind"), [(True, MIXED), (False, CHUNK)])
def test_products_of_many_rows_end_with_the_steps_tokens(stores_heads, kind, tiny_model, make_gpu_driver, monkeypatch):
    """The same tokens as in a bucket of the step's size, and no tile of padding: of a prompt alone, and of one beside
    a row that decodes."""
    plan = LinearPlan("gemm", 128, 64, 4, norm_apart=True)
    monkeypatch.setattr(tuning, "default_plan", lambda *_, **__: plan)
    monkeypatch.setattr(gemm, "takes_gluon", lambda major: stores_heads)
    monkeypatch.setattr(gemm, "gemm_plan", lambda *_, **__: plan)
    monkeypatch.setattr(fused_forward, "qk_norm_rope_store", store_by_reference)  # the interpreter takes seconds for it
    emulate(monkeypatch, gemm_hopper, "_gemm_kernel", ragged=RAGGED)
    exact, padded = runner.exact_bucket, []

    def larger_bucket(*sizes: int, **options: bool) -> Bucket:
        bucket = exact(*sizes, **options)
        if bucket.kind != kind:
            return bucket
        padded.append(bucket._replace(tokens=BUCKET_TOKENS))
        return padded[-1]

    _, folder = tiny_model("Qwen3", **SIZES)
    found = []
    for bucket_of_step in (exact, larger_bucket):
        monkeypatch.setattr(runner, "exact_bucket", bucket_of_step)
        driver = make_gpu_driver(folder, "cpu", dtype=torch.float16, step_tokens=BUCKET_TOKENS)
        forward = driver.runner.program._forward
        unused = poison_buffers(forward)
        first, second = (driver.add(prompt(length, seed=length)) for length in (7, 4))
        driver.step([(first, 7)])
        driver.step([(first, 1), (second, 4)])
        found.append((first.output, second.output, forward.logits[:2].clone()))
        assert all(rows.isnan().all() for rows in unused)
        assert (forward._workspace.rows("normed", BUCKET_TOKENS, 128)[TILE_ROWS:] == 3).all()
        assert bucket_of_step is exact or not forward.hidden[TILE_ROWS:].isnan().any()
    assert len(padded) == 1
    assert found[0][:2] == found[1][:2] and len(first.output) == 2
    torch.testing.assert_close(found[0][2], found[1][2], rtol=2**-8, atol=2**-8)
