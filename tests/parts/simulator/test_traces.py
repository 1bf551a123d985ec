"""Request traces are replayed as their file says, and made as they were asked for."""

import numpy as np
import pytest

from rose.parts.simulator import traces
from rose.parts.simulator.traces import Trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROWS = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
ROWS += "2023-11-16 18:16:46.6805900,0,1\n"


@pytest.fixture
def read(tmp_path):
    """read(text) -> the trace of a file with it."""

    def read(text: str):
        (tmp_path / "trace.csv").write_text(text)
        return traces.read(tmp_path / "trace.csv")

    return read


SIZES = np.array([10, 200, 30, 40], np.int32), np.array([1, 2, 300, 4], np.int32)
SMALL = Trace(np.array([0.0, 1.0, 2.5, 4.0]), *SIZES)


def said(found: Trace) -> tuple[list, list, list]:
    return found.at.tolist(), found.prompt_tokens.tolist(), found.output_tokens.tolist()


MADE = '{"timestamp": %s, "input_length": %s, "output_length": %s}\n'
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def test_a_file_of_azures_format_is_read_to_the_microsecond(read):
    found = read(HEADER + ROWS)
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
def test_a_format_is_told_by_its_first_line(read, text, expected):
    assert said(read(text)) == expected


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


def test_mooncakes_prefixes_go_with_their_requests(read):
    line = '{"timestamp": %d, "input_length": 600, "output_length": 5%s}\n'
    text = "".join(line % (1000 * at, f', "hash_ids": [{at}, 7]') for at in range(4))
    found = read(text)
    assert found.blocks == ((0, 7), (1, 7), (2, 7), (3, 7))
    assert found.slice(1, 2).blocks == found.scaled(2).clipped(10, 10).blocks[1:3]
    assert found.slice(1, 2).blocks == found.blocks[1:3]
    assert read(text + line % (4000, "")).blocks is None


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
