"""When a benchmark begins: once the engine has nothing more to prepare."""

import pytest

from benchmarks.engines import PREPARED_LIMIT_S, wait_until_prepared


@pytest.mark.parametrize("counts", [[0], [132, 131, 131, 0], [1, 2, 0]])
def test_a_benchmark_waits_until_the_engine_has_prepared_everything_and_no_longer(counts):
    """It waited ten seconds, in which a first start on a small host was not done, and others had been for long."""
    left, slept = list(counts), []
    wait_until_prepared(lambda: left.pop(0), slept.append)
    assert left == [] and len(slept) == len(counts) - 1


def test_an_engine_that_is_never_done_is_named_and_not_measured():
    slept = []
    with pytest.raises(TimeoutError, match=r"after 300 s the engine has 7 sizes of steps left to prepare"):
        wait_until_prepared(lambda: 7, slept.append)
    assert sum(slept) == pytest.approx(PREPARED_LIMIT_S)
