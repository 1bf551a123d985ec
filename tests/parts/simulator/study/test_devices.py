"""The online service of ROSE's paper, alone as in its Table 1, and beside rollouts."""

from array import array
from statistics import fmean

import pytest

from rose.parts.simulator import lending
from rose.parts.simulator.study import build

WHOLE = 900.0  # seconds of the made trace


def latencies(c, seed):
    """Yield the latencies of serving alone, then beside rollouts that always run."""
    what = build.make_spec(c, "rose", build.ours(c), seed)
    [serving] = [pool.serving for pool in what.pools if pool.serving]
    for spans in ([], [0.0, WHOLE]):
        observer = lending.Observer("cooperative", serving, WHOLE)
        for device in range(4):  # the other devices are copies of these four
            observer.add(*serving.devices.load(device), array("d", spans))
        yield observer.result().beside


@pytest.mark.parametrize("setting, paper_s", [("rose_8b", 0.315), ("rose_32b", 0.716)])
def test_serving_alone_is_as_late_as_in_the_paper(make_config, setting, paper_s):
    c = make_config("mode=simulate", f"+experiment={setting}")
    pairs = [tuple(latencies(c, seed)) for seed in (1, 2, 3)]
    assert fmean(alone.ttft_p99_s for alone, _ in pairs) == pytest.approx(paper_s, rel=0.2)
    ttft = fmean(beside.ttft_p99_s / alone.ttft_p99_s for alone, beside in pairs)
    tpot = fmean(beside.tpot_p99_s / alone.tpot_p99_s for alone, beside in pairs)
    assert 1.0 < ttft < 1.2 and 1.1 < tpot < 1.3  # the paper 1.07 and 1.17; 1.15 and 1.27
