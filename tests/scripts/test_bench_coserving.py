"""The co-serving benchmark: figures follow from what was measured, the client is an open loop, the
runs are real."""

import asyncio
import json
import os

import numpy as np
import pytest
from aiohttp import web

from rose.parts.simulator.traces import Trace
from scripts.harness import Failed
from scripts.lending import bench_coserving
from scripts.lending import bench_coserving_tables as tables
from scripts.lending.bench_coserving_client import replay
from scripts.lending.bench_coserving_tables import Alone, Run, Slo
from tests import processes

SLO = Slo(0.1, 0.2, 0.01, 0.02)


def run(scenario, seed=0, slow=1.0, busy=0.25, made=0.0, done=True, **rest):
    """Ten requests whose latencies are `slow` times those of S alone."""
    ttft, tpot = [slow * (0.05 + 0.01 * n) for n in range(10)], [slow * 0.01] * 9 + [None]
    return Run(scenario, seed, 10.0, ttft, tpot, [True] * 9 + [done], 0.001, busy, made, **rest)


def test_the_table_has_a_row_a_scenario():
    runs = []
    for seed in range(3):
        ours = run("ours", seed, 1.05, made=400.0, evicted=2, wasted=50, open=0.8)
        runs += [run("alone", seed), run("naive", seed, 3.0, made=600.0)]
        runs += [run("alone", seed, 1.02), ours]
    rows = tables.table(runs, SLO, Alone([800.0] * 3, []))
    assert [row["scenario"] for row in rows] == ["alone", "naive", "ours"]
    ours = rows[2]
    assert (ours["requests"], ours["aborted"], ours["evicted"], ours["wasted"]) == (30, 0, 6, 150)
    assert ours["harvest_low"] == pytest.approx(400 / 600) and rows[0]["harvest_mean"] is None
    assert ours["ttft_p99_ratio_mean"] == pytest.approx(1.05 / 1.01)
    assert (ours["attainment_low"], ours["attainment_high"]) == (1.0, 1.0)
    shown = tables.shown(rows)[2].values()
    assert {"1.04 (1.04 to 1.04)", "67% (67 to 67)", "80%", "30, 0"} <= set(shown)


# --------------------------------------------------------------------------- the client


@pytest.fixture
def serve():
    """serve(handler, trace, **replay's) -> requests."""

    async def one(handler, trace, kwargs):
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)  # one hangs
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        try:
            return await replay(url, "s", trace, 0, **{"drain_s": 5.0} | kwargs)
        finally:
            await runner.cleanup()

    return lambda handler, trace, **kwargs: asyncio.run(one(handler, trace, kwargs))


CHUNK = b'data: {"choices":[{"text":"w","finish_reason":%b}]}\n\n'


async def stream(request, response, count, wait_s):
    await response.prepare(request)
    for number in range(count):
        await asyncio.sleep(wait_s)
        end = '"length"' if number == count - 1 else "null"
        await response.write(CHUNK % end.encode())
    await response.write(b"data: [DONE]\n\n")


def trace_of(*at, output=3):
    prompts, outputs = (np.full(len(at), tokens, np.int32) for tokens in (5, output))
    return Trace(np.array(at, float), prompts, outputs)


def test_requests_are_sent_at_their_times_however_long_earlier_ones_take(serve):
    came, all_are_there = [], asyncio.Event()

    async def slow(request):
        """Answers none before all have come."""
        came.append(request)
        if len(came) == 3:
            all_are_there.set()
        await all_are_there.wait()
        assert len((await request.json())["prompt"]) == 5
        response = web.StreamResponse()
        await stream(request, response, 3, 0.01)
        return response

    requests = serve(slow, trace_of(0.0, 0.2, 0.4), drain_s=120.0)
    assert [r.done for r in requests] == [True] * 3 and all(len(r.chunks) == 3 for r in requests)
    assert all(r.tpot == pytest.approx((r.chunks[2] - r.chunks[0]) / 2) for r in requests)


def test_every_way_in_which_a_request_fails_is_told(serve):
    kinds = ["refuse", "cut", "hang", "leave"]
    trace = Trace(np.array([0.0, 0.1, 0.2, 0.3]), np.arange(1, 5, dtype=np.int32), np.full(4, 3))

    async def bad(request):
        # by its prompt's length: on a busy machine they may overtake each other
        kind = kinds[len((await request.json())["prompt"]) - 1]
        if kind == "refuse":
            return web.Response(status=503, text="too busy")
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(CHUNK % b"null")
        if kind != "cut":
            await asyncio.sleep(60)
        return response

    requests = serve(bad, trace, drain_s=5.0, leave={3: 0.2})
    assert not any(r.done for r in requests)
    why = ["status 503: too busy", "ended early", "not done in time", "left"]
    assert [r.why for r in requests] == why
    assert [r.tpot for r in requests] == [None] * 4 and requests[1].ttft is not None


# --------------------------------------------------------------------------- options, a real run


REFUSED = {"sconds=3": "no such option", "seconds=many": "'many' is no float"}
REFUSED |= {"scenarios=alone,best": "no best", "scenarios=ours": "alone is needed"}


@pytest.mark.parametrize("word, said", [*REFUSED.items(), ("device=99", "device=99")])
def test_a_wrong_option_is_named(word, said):
    with pytest.raises(Failed, match=said):
        bench_coserving.parse([word])


@pytest.mark.slow
@pytest.mark.soak  # Four minutes, and tests/soak/soak_coserving.py starts the same engines.
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core is the device, another one the host"
)
def test_a_short_run_measures_s_alone_and_beside_rollouts_and_leaves_nothing(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("ROSE_CACHE", str(tmp_path / "cache"))
    # nothing is measured here: a machine with other guests will do
    monkeypatch.setattr("scripts.live_runs.PATIENCE_S", 0.0)
    waits = {"TRIES": 1, "SETTLE_S": 0.2, "BASELINE_S": 5.0, "DRAIN_S": 120.0}
    waits["CALIBRATE_S"] = (1.0, 2.0)
    for name, value in waits.items():
        monkeypatch.setattr(f"scripts.lending.bench_coserving_bench.{name}", value)
    given = ["scenarios=alone,naive", "seconds=5", "seeds=1", "model=128x1", "concurrency=8"]
    given += ["slo=0.1,0.2,0.01,0.02", f"out={tmp_path}"]
    cores = os.sched_getaffinity(0)
    assert bench_coserving.main(given) == 0
    found = json.loads((tmp_path / "bench_coserving.json").read_text())
    assert [one["scenario"] for one in found["runs"]] == ["alone", "naive", "alone"]
    alone, naive, _ = found["runs"]
    assert len(alone["done"]) == len(naive["done"]) > 0 and all(alone["done"])
    assert naive["made"] > 0 == alone["made"] and 0 < alone["busy"] < 1
    assert found["alone"]["engine"][0] > 0
    assert len((tmp_path / "bench_coserving.csv").read_text().splitlines()) == 3
    assert "attainment" in capsys.readouterr().out and os.sched_getaffinity(0) == cores
    assert not processes.left(lambda: processes.bearing(str(tmp_path)))
