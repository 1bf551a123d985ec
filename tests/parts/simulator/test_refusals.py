"""Bad arguments and bad files of the simulator are refused, files with the place."""

import math

import numpy as np
import pytest

from rose.parts.simulator import calibrate, domains, faults, hardware, lending, online, spec, traces
from rose.parts.simulator.calibrate import CalibrationError
from rose.parts.simulator.domains import DOMAINS
from rose.parts.simulator.environments import Environments
from rose.parts.simulator.hardware import GPUS, SHAPES
from rose.parts.simulator.study.gains import gain, quantile
from rose.parts.simulator.traces import Trace, TraceError, spot
from tests.parts.simulator.clusters import ENGINE, steady_load

SWE = DOMAINS["swe"]
SPANS = [(0.0, 1.0)], [(2.0, 1.0)], [(1.0, 3.0), (2.0, 4.0)]


def trace(*requests):
    at, *sizes = np.array(requests, np.float64).reshape(-1, 3).T
    return Trace(at, *(size.astype(np.int32) for size in sizes))


def made(seconds=3600.0, **arguments):
    return spot.generate(0, seconds, **arguments)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: spec.StepTime(0.0, 1e-5, 0.0, 0.0, 1e-9), "would take no time"),
        (lambda: spec.StepTime(math.nan, 0.0, 0.0, 1.0, 0.0), "finite"),
        (lambda: Environments((), 8192), "0 domains"),
        (lambda: Environments((SWE,), 8192, (0.0,)), "one positive weight each"),
        (lambda: Environments((SWE,), 2048), "max_context=2048"),
        (lambda: domains.domain("chess"), "environment 'chess': its trajectories are unknown"),
        (lambda: SWE.scaled("name", 1.2), "no parameter that can be scaled"),
        *((lambda down=down: faults.up(down), "ascending and apart") for down in SPANS),
        (lambda: faults.hosts(2, [(5.0, 2)], "none", 0.1, 1.0, 3.0), "host 2, .*: there are 2"),
        (lambda: hardware.gpu("H900"), "GPU 'H900': no peak rates are known; known are H100"),
        (lambda: hardware.shape("gpt"), "model 'gpt': no shape is known; known are qwen3_8b"),
        (lambda: hardware.step_time(SHAPES["qwen2_5_7b"], GPUS["H800"], 8, 256), "divide the"),
        (lambda: hardware.kv_tokens(SHAPES["qwen3_32b"], GPUS["L40S"], 1), "raise tensor_parallel"),
        (lambda: lending.Pace(steady_load(1.0), np.zeros(1), 0.0), "no compute"),
        (lambda: online.serve(trace(), ENGINE), "a trace without"),
        (
            lambda: online.serve(trace((0, 59_999, 10)), ENGINE),
            "a request of 60009 tokens is large",
        ),
        *((lambda by=by: trace((0, 1, 1)).scaled(by), "factor") for by in (0, -1, np.nan, np.inf)),
        (lambda: traces.generate(0, rate=0), "rate=0"),
        (lambda: traces.generate(0, seconds=-1), "seconds=-1"),
        (lambda: traces.generate(0, minute_peak=0.5), "a peak of 0.5"),
        (lambda: traces.generate(0, second_peak=1e9), "a peak of 1000000000"),
        (lambda: traces.generate(0, minute_peak=3, second_peak=1.1), "second_peak=1.1"),
        (lambda: traces.generate(0, seconds=1, rate=1e-9), "no request arrives"),
        (
            lambda: traces.generate(0, prompt="azure"),
            "of 'azure'; known are azure_conv, azure_code",
        ),
        (lambda: made(life_s=0), "life_s=0"),
        (lambda: made(removed_at_once=0.5), "at_once=0.5"),
        (lambda: made(most=0), "most=0"),
        (lambda: made(seconds=-1), "seconds=-1"),
        (lambda: quantile(0), "degrees=0"),
        (lambda: gain([1.0, 2.0], [1.0]), "shorter"),
    ],
)
def test_what_cannot_be_made_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
FIRST, LATER = "2023-11-16 18:15:46.6805900,374,44\n", "2023-11-16 18:15:50.9951690,396,109\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
MADE = '{"timestamp": %s, "input_length": %s, "output_length": %s}\n'
DAY = "2021-12-11, 11:00:00, "
REQUESTS = [
    ("", "line 1: an empty file is no header of a request trace; known are Azure"),
    ("a,b\n1,2\n", r"line 1: \['a', 'b'\] is no header of a request trace; known are Azure"),
    (AZURE, "no requests below the header"),
    (AZURE + FIRST + "2023-11-16 18:15:51,396\n", "line 3, column GeneratedTokens"),
    (AZURE + LATER + FIRST, "line 3, column TIMESTAMP: .* is before the time of"),
    (AZURE + "yesterday,1,2\n", "line 2, column TIMESTAMP: 'yesterday' is no time"),
    (AZURE + "NaT,1,2\n", "line 2, column TIMESTAMP: 'NaT' is no time"),
    (AZURE + "2023-11-16 18:15:46,-3,2\n", "line 2, column ContextTokens: -3 tokens, not"),
    (AZURE + FIRST + "\n2023-11-16 18:15:59,5,many\n", "line 4, column GeneratedTokens"),
    (AZURE + "2023-11-16 18:15:46,99999999999,2\n", "line 2, column ContextTokens"),
    (AZURE + FIRST + '"' + "x" * 200_000, "line 3: no CSV: field larger than field limit"),
    (BURST.replace("Response tokens,", "") + "5,ChatGPT,4,8,C\n", "line 1: no column Response"),
    (BURST + "-5,ChatGPT,472,18,490,C\n", "line 2, column Timestamp: -5 is no time"),
    (BURST + "soon,ChatGPT,472,18,490,C\n", "line 2, column Timestamp: 'soon' is no number"),
    ('{"timestamp": 1, "input_length": 5}\n', "line 1: no column output_length; Mooncake"),
    ('{"timestamp": 1, "input_length": 5,\n', "line 1, character .*: no JSON"),
    ('{"timestamp": 1, "input_length": ' + "9" * 5000, "line 1: no JSON object of a trace"),
    ('{"timestamp": ' + "[" * 200_000, "line 1: no JSON object of a trace"),
    (MADE % (1, 5, 1) + "[1]\n", "line 2: .* is no JSON object"),
    (MADE % (1, 5.5, 1), "line 1, column input_length: 5.5 is no whole"),
    (MADE % (1, "true", 1), "line 1, column input_length: True is no whole"),
    (MADE % ("NaN", 5, 1), "line 1, column timestamp: nan is no time"),
    (
        MADE[:-2] % (0, 6, 5) + ', "hash_ids": 7}',
        "line 1, column hash_ids: '7' is no list of whole",
    ),
]
INSTANCES = [
    ("", "line 1: an empty file"),
    ("0,add,a\n0,add,a\n", "line 2, column 3: a is added twice"),
    ("0,remove,a\n", "line 1, column 3: a is not there"),
    ("5,add,a\n4,add,b\n", "line 2, column 1: 4 is before the time of the line above"),
    ("-5,add,a\n", "line 1, column 1: -5 is negative"),
    ("0,add\n", "line 1, column 3: 2 fields; needed are 3"),
    ("0,lend,a\n", "line 1, column 2: 'lend' is neither add nor remove"),
    ("0,add,a\n", "no instance is there for any time"),
    ("2021-12-11, noon, 4\n", "line 1, column 1: .* is no time like"),
    (DAY + "few\n", "line 1, column 3: 'few' is no whole number"),
    (DAY + "4\n2021-12-11, 10:00:00, 4\n", "line 2, column 2: .* is before"),
    (DAY + "99999999999\n", "line 1, column 3: 99999999999 is more than 1e.06"),
    ("9" * 400 + ",add,a\n", "line 1, column 1: 9+ is more than 1e.15"),
    ("0,add," + "x" * 200_000, "line 1: no CSV: field larger than field limit"),
]
STEPS = [('{"began": 1}\n', "line 1: no step of an engine"), ("", "0 steps of decodes alone")]
NONE = "no trajectory of a training step ended"
JOURNALS = [("{}\n", NONE), ('{"event": {}}\nnonsense\n', "line 2: no JSON")]


@pytest.mark.parametrize(
    "read, text, words",
    [
        *((traces.read, *row) for row in REQUESTS),
        *((spot.read, *row) for row in INSTANCES),
        *((lambda path: calibrate.of_steps([path]), *row) for row in STEPS),
        *((calibrate.of_journal, *row) for row in JOURNALS),
    ],
)
def test_a_bad_file_is_refused_with_the_place_that_is_wrong(tmp_path, read, text, words):
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises((TraceError, CalibrationError), match=words) as caught:
        read(path)
    assert str(path) in str(caught.value)
