"""Request traces: what a file says is what is replayed, and a made one bursts as it was asked
to."""

import numpy as np
import pytest

from rose.parts.simulator import traces
from rose.parts.simulator.traces import Trace, TraceError

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROWS = [
    "2023-11-16 18:15:46.6805900,374,44",
    "2023-11-16 18:15:50.9951690,396,109",
    "2023-11-16 18:16:46.6805900,0,1",
]


@pytest.fixture
def write(tmp_path):
    def write(text: str):
        (tmp_path / "trace.csv").write_text(text)
        return tmp_path / "trace.csv"

    return write


def trace(at, prompt, output) -> Trace:
    return Trace(np.array(at), np.array(prompt, np.int32), np.array(output, np.int32))


SMALL = trace([0.0, 1.0, 2.5, 4.0], [10, 200, 30, 40], [1, 2, 300, 4])


def said(found: Trace) -> tuple[list, list, list]:
    return found.at.tolist(), found.prompt_tokens.tolist(), found.output_tokens.tolist()


MADE = '{"timestamp": %s, "input_length": %s, "output_length": %s}\n'
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def test_a_file_of_azures_format_is_read_to_the_microsecond(write):
    found = traces.read(write(HEADER + "\n".join(ROWS) + "\n"))
    expected = (pytest.approx([0, 4.314579, 60.0], abs=1e-9), [374, 396, 0], [44, 109, 1])
    assert said(found) == expected
    expected = (np.float64, np.int32, np.int32)
    assert (found.at.dtype, found.prompt_tokens.dtype, found.output_tokens.dtype) == expected


UTC = "2024-05-10 00:00:0%d.009930+00:00,1,2\n"
MOONCAKE = MADE % (27482, 6955, 52) + "\n" + MADE % (30535, 6472, 26)


@pytest.mark.parametrize(
    "text, expected",
    [
        (  # columns among others, and blank lines
            "id,GeneratedTokens,TIMESTAMP,ContextTokens\r\n7,44,2023-11-16 18:15:46,374\r\n\r\n",
            ([0.0], [374], [44]),
        ),
        (HEADER + UTC % 0 + UTC % 1, ([0.0, 1.0], [1, 1], [2, 2])),
        (  # which keeps what failed
            BURST + "5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,1087,0,1087,API log\n",
            ([0.0, 40.5], [472, 1087], [18, 0]),
        ),
        (MOONCAKE, (pytest.approx([0, 3.053], abs=1e-12), [6955, 6472], [52, 26])),
    ],
    ids=["azure", "azure of 2024", "burstgpt", "mooncake"],
)
def test_a_format_is_told_by_its_first_line(write, text, expected):
    assert said(traces.read(write(text))) == expected


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "line 1: an empty file is no header of a request trace; known are Azure"),
        ("a,b\n1,2\n", r"line 1: \['a', 'b'\] is no header of a request trace; known are Azure"),
        (HEADER, "no requests below the header"),
        (HEADER + ROWS[0] + "\n2023-11-16 18:15:51,396\n", "line 3, column GeneratedTokens"),
        (HEADER + ROWS[1] + "\n" + ROWS[0], "line 3, column TIMESTAMP: .* is before the time of"),
        (HEADER + "yesterday,1,2\n", "line 2, column TIMESTAMP: 'yesterday' is no time"),
        (HEADER + "NaT,1,2\n", "line 2, column TIMESTAMP: 'NaT' is no time"),
        (HEADER + "2023-11-16 18:15:46,-3,2\n", "line 2, column ContextTokens: -3 tokens, not"),
        (HEADER + ROWS[0] + "\n\n2023-11-16 18:15:59,5,many\n", "line 4, column GeneratedTokens"),
        (HEADER + "2023-11-16 18:15:46,99999999999,2\n", "line 2, column ContextTokens"),
        (HEADER + ROWS[0] + '\n"' + "x" * 200_000, "line 3: no CSV: field larger than field limit"),
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
    ],
)
def test_a_bad_file_is_refused_with_the_place_that_is_wrong(write, text, words):
    path = write(text)
    with pytest.raises(TraceError, match=words) as caught:
        traces.read(path)
    assert str(caught.value).startswith(str(path))


def test_a_slice_counts_from_its_start_and_excludes_its_end():
    cut = SMALL.slice(1.0, 3.0)
    assert cut.at.tolist() == [0.0, 1.5] and cut.prompt_tokens.tolist() == [200, 30]
    assert len(SMALL.slice(10, 5)) == 0 and SMALL.slice(10, 5).seconds == 0


def test_scaling_changes_times_or_lengths_and_loses_no_request():
    assert SMALL.scaled(2).at.tolist() == [0, 2, 5, 8]
    scaled, clipped = SMALL.tokens_scaled(0.1, 0.25), SMALL.clipped(100, 3)
    assert said(scaled)[1:] == ([1, 20, 3, 4], [1, 1, 75, 1])
    assert said(clipped)[1:] == ([10, 100, 30, 40], [1, 2, 3, 3])
    assert {scaled.prompt_tokens.dtype, clipped.output_tokens.dtype} == {np.dtype(np.int32)}


@pytest.mark.parametrize("factor", [0, -1, float("nan"), float("inf")])
def test_a_time_factor_must_be_positive(factor):
    with pytest.raises(ValueError, match="time_factor"):
        SMALL.scaled(factor)


def test_a_made_trace_has_the_rate_the_lengths_and_the_peaks_asked_for():
    made = [traces.generate(seed, rate=50) for seed in range(8)]
    assert np.mean([len(trace) / 3600 for trace in made]) == pytest.approx(50, rel=0.03)
    assert np.mean([trace.peak(60) for trace in made]) == pytest.approx(1.7, rel=0.12)
    assert np.mean([trace.peak(1) for trace in made]) == pytest.approx(4.2, rel=0.15)
    lengths = np.concatenate([trace.prompt_tokens for trace in made])
    assert np.median(lengths) == pytest.approx(1020, rel=0.02)
    assert np.log(lengths).std() == pytest.approx(0.99, rel=0.02)
    for trace in made:
        assert trace.at[0] == 0 and (np.diff(trace.at) >= 0).all() and trace.seconds < 3600
        assert trace.prompt_tokens.min() >= 1 and trace.output_tokens.min() >= 1


def test_mooncakes_prefixes_go_with_their_requests(write):
    line = '{"timestamp": %d, "input_length": 600, "output_length": 5%s}\n'
    text = "".join(line % (1000 * at, f', "hash_ids": [{at}, 7]') for at in range(4))
    found = traces.read(write(text))
    assert found.blocks == ((0, 7), (1, 7), (2, 7), (3, 7))
    assert found.slice(1, 2).blocks == found.scaled(2).clipped(10, 10).blocks[1:3]
    assert found.slice(1, 2).blocks == found.blocks[1:3]
    assert traces.read(write(text + line % (4000, ""))).blocks is None
    with pytest.raises(TraceError, match="line 1, column hash_ids: '7' is no list of whole"):
        traces.read(write(line % (0, ', "hash_ids": 7')))


def test_a_made_trace_has_the_lengths_of_a_named_service_and_none_that_it_has_not():
    made = traces.generate(1, rate=20, prompt="azure_code", output="azure_code")
    expected = pytest.approx([1469, 5188, 7436, 7437], rel=0.05)
    assert np.percentile(made.prompt_tokens, [50, 90, 99, 100]) == expected
    assert np.percentile(made.output_tokens, [0, 50, 90]) == pytest.approx([6, 13, 55], rel=0.05)
    assert made.output_tokens.max() <= 1899


def test_a_steady_trace_is_poisson_and_the_seed_decides():
    steady = traces.generate(1, rate=100, minute_peak=1, second_peak=1)
    counts = np.bincount(steady.at.astype(int))
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.15)
    first, again, other = (traces.generate(seed).at.tolist() for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize(
    "arguments, said",
    [
        (dict(rate=0), "rate=0"),
        (dict(seconds=-1), "seconds=-1"),
        (dict(minute_peak=0.5), "a peak of 0.5"),
        (dict(second_peak=1e9), "a peak of 1000000000"),
        (dict(minute_peak=3, second_peak=1.1), "second_peak=1.1"),
        (dict(seconds=1, rate=1e-9), "no request arrives"),
        (dict(prompt="azure"), "lengths like those of 'azure'; known are azure_conv, azure_code"),
    ],
)
def test_a_trace_that_cannot_be_made_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        traces.generate(0, **arguments)
