"""Trajectories as people read them: by `rose show`, and in the report."""

import json
import os
import re
import sys
import threading

import msgspec
import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers

from rose import protocol as p
from rose.coordinator import replay
from rose.observe import failed
from rose.parts.report import conversations, show
from rose.parts.report.report import build_report
from rose.parts.report.trajectories import Texts, notable, read, read_failed, saved_steps
from tests.made import trajectory as drawn
from tests.processes import ran

WORDS = ["<pad>", "go", "left", "right", "wall", "<b>", "goal", "again", "\x1b[2J\x9b1m\b"]


def trajectory(name, parts, reward=0.0, **told):
    """`parts`: runs of words, given and made in turn; version 3 made them, the last run version 4."""
    tokens, mask, versions = [], [], []
    for number, part in enumerate(parts):
        made = number % 2
        words = part.split()
        tokens += [WORDS.index(word) for word in words]
        mask += [made] * len(words)
        version = 4 if number == len(parts) - 1 else 3
        versions += [version if made else -1] * len(words)
    logprobs = np.where(mask, -0.5, 0.0)
    told |= {"success": reward > 0.5, "turns": len(parts) // 2, "domain": "lake"}
    return drawn(name, tokens, mask, logprobs, versions, reward, **told)


def start_of(name):
    return p.StartTrajectory(name, name.split(".")[0], p.Phase.TRAIN, "lake", 8, None)


def keep(run, name, made=None, output=""):
    keeper = failed.Keeper(run)
    keeper.keep(start_of(name), "it <b>sank</b>\x1b[2J", "row 7", output, made)
    keeper.close()


@pytest.fixture
def run(tmp_path):
    """A run of two steps, with its model's tokenizer."""
    model = tmp_path / "model"
    model.mkdir()
    tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(model / "tokenizer.json"))
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model": {"path": str(model)}}))
    first = [trajectory("g0.0", ["go", "left"]), trajectory("g0.1", ["go", "goal"])]
    replay.save(folder, 1, [first])
    second = [trajectory("g1.0", ["go go", "left <b>", "wall", "right goal"], 1.0)]
    second += [trajectory("g1.1", ["go go", "left"], 0.25)]
    third = [trajectory("g2.0", ["go", "again again again again again"], 0.5)]
    third += [trajectory("g2.1", ["go", "wall"], 0.0, truncated=True)]
    third += [trajectory("g2.2", ["go", "wall"], 0.1, invalid_calls=2)]
    replay.save(folder, 2, [second, third])
    return folder


@pytest.fixture
def shown(run, capsys, monkeypatch):
    """shown(argument, ...) -> (exit code, stdout, stderr) of `rose show`."""

    def shown(*arguments, of=run, columns=140):
        monkeypatch.setenv("COLUMNS", str(columns))
        capsys.readouterr()
        try:
            code = show.main([str(of), *arguments])
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return shown


def test_a_trajectory_is_its_runs_of_given_and_made_tokens(run):
    found = read(run, 2)[0]
    assert found.id == "g1.0" and found.made == 4 and found.length == 7
    parts, texts = list(found.samples[0].parts()), Texts(run)
    found = [(part.made, part.start, texts.of(part.tokens)) for part in parts]
    made = [(True, 2, "left <b>"), (True, 5, "right goal")]
    assert found[::2] == [(False, 0, "go go"), (False, 4, "wall")] and found[1::2] == made
    assert [part.of_versions for part in parts] == ["", "version 3", "", "version 4"]
    assert saved_steps(run) == [1, 2]
    path = replay.path_of(run, 2)
    records = msgspec.msgpack.decode(path.read_bytes())
    records[0][0]["leaf"] = [1, 2]  # a key of a later release
    path.write_bytes(msgspec.msgpack.encode(records))
    assert read(run, 2)[0].made == 4


def test_the_few_that_tell_most_are_the_best_the_worst_the_longest_and_a_failed_one(run):
    expected = [("best", "g1.0"), ("worst, failed", "g2.1"), ("longest", "g2.0")]
    assert [(why, each.id) for why, each in notable(read(run, 2))] == expected
    assert notable([]) == []


def test_the_list_the_conversation_and_the_tokens_of_a_trajectory(run, shown):
    code, out, err = shown()
    assert code == 0 and err == "" and "Step 2: 5 trajectories" in out
    assert re.search(r"g1\.0 +lake +1 +2 +1 +7 +4 +3 to 4 solved", out), out
    assert re.search(r"g2\.1 .* not solved, cut by a limit", out)
    assert "2 unreadable calls" in out
    code, out, _ = shown(columns=80)
    assert code == 0 and "trajectory environment reward turns samples tokens made versions" in out
    assert "…" not in out and "unreadable" in out, out
    for arguments in (["g0.1"], ["g0.1", "--step", "1"], ["--step", "1", "g0.1"]):
        code, out, _ = shown(*arguments)
        assert code == 0 and "step 1, group g0" in out and "goal" in out
    code, out, _ = shown("g1.0")
    assert code == 0 and "policy · tokens 2 to 3 · version 3 · mean log-probability -0.500" in out
    assert out.index("go go") < out.index("left <b>") < out.index("wall") < out.index("right goal")
    command = [sys.executable, "-m", "rose", "show", str(run), "g1.0"]
    assert ran(command, timeout=120, env=os.environ | {"COLUMNS": "140"}).stdout == out
    code, out, _ = shown("g1.0", "--tokens")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and ["2", "2", "1", "3", "-0.5000", "left"] in lines
    assert ["4", "4", "0", "wall"] in lines


def test_those_that_failed_are_listed_and_shown_with_what_their_programs_printed(run, shown):
    keep(run, "g7.0")
    keep(run, "g7.1", trajectory("g7.1", ["go", "left <b>"]), "no <i>water</i>\x1b[2J")
    code, out, _ = shown("--failed")
    assert code == 0 and "2 failed and replaced" in out and out.index("g7.0") < out.index("g7.1")
    assert "sank" in out and "row 7" in out and "\x1b" not in out
    keep(run, "g2.0")  # An earlier attempt failed here; step 2 has a good one.
    assert "step 2" in shown("g2.0")[1] and "sank" in shown("g2.0", "--failed")[1]
    (run / "failed" / "g2.0.msgpack").unlink()
    code, out, _ = shown("g7.1")
    assert code == 0 and "failed and was replaced" in out and "task row 7: it <b>sank</b>" in out
    assert "left <b>" in out and "no <i>water</i>" in out and "\x1b" not in out
    assert shown("g7.0")[0] == 0, "it has no tokens"
    html = conversations.html(run)
    assert "the newest 2 of 2" in html and "no &lt;i&gt;water" in html
    assert "it &lt;b&gt;sank" in html and "\x1b" not in html
    (run / "failed" / "g7.0.msgpack").write_bytes(b"\x80")  # a map without anything
    code, _, err = shown("--failed", "g7.0")
    assert code == 1 and "no such trajectory failed" in err
    code, _, err = shown("--failed")
    assert code == 1 and "g7.0.msgpack: holds no trajectory" in err
    assert "g7.0.msgpack: holds no trajectory" in conversations.html(run)


def test_what_is_not_there_is_named(run, shown, tmp_path):
    steps = "in steps 1 to 2; step 1 has g0.0, g0.1"
    assert shown("g9.9")[0] == 1 and f"'g9.9': no such trajectory {steps}" in shown("g9.9")[2]
    (young := tmp_path / "young").mkdir()
    for given, of, words in (
        (["--step", "7"], run, "has steps 1 to 2"),
        ([], young, "no rollouts/step-N.msgpack there"),
        (["--failed"], run, "has failed"),
    ):
        code, _, err = shown(*given, of=of)
        assert code == 2 and words in err
    path = replay.path_of(run, 2)
    path.write_bytes(path.read_bytes()[:-9])
    code, _, err = shown()
    assert code == 1 and str(path) in err and "holds no trajectories" in err
    keep(young, "g7.0")
    code, out, _ = shown(of=young)
    assert code == 0 and "g7.0" in out, "a run without a step lists what failed"
    code, _, err = shown("g9.0", of=young)
    assert code == 1 and "no such trajectory" in err


def test_only_the_newest_that_failed_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(failed, "MOST", 4)
    for number in range(9):
        keep(tmp_path, f"g{number}.0")
        os.utime(tmp_path / "failed" / f"g{number}.0.msgpack", (number, number))
    found, damaged = read_failed(tmp_path)
    assert [shown.id for shown in found][-3:] == ["g6.0", "g7.0", "g8.0"] and not damaged
    assert len(found) <= 5 and [s.id for s in read_failed(tmp_path, 2)[0]] == ["g7.0", "g8.0"]


def test_what_can_not_be_kept_costs_nothing_else(tmp_path, monkeypatch, capfd):
    odd = trajectory("g7.0", ["go", "left"], stats={"\ud800": 1.0})
    keep(tmp_path, "g7.0", odd)
    assert "is not kept: UnicodeEncodeError" in capfd.readouterr().out
    monkeypatch.setattr(failed, "MOST_BYTES", 500)
    keep(tmp_path, "g7.1", trajectory("g7.1", ["go", "left " * 500]))
    [found] = read_failed(tmp_path)[0]
    assert found.samples == [] and found.record["task"] == "row 7", "the words alone"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "failed").write_text("a file where the folder would be")
    keep(tmp_path / "other", "g7.0")
    assert "is not kept: FileExistsError" in capfd.readouterr().out
    # A disk that hangs holds up nobody.
    goes_on = threading.Event()
    monkeypatch.setattr(failed, "write_whole", lambda *_: goes_on.wait())
    monkeypatch.setattr(failed, "CLOSE_S", 0.1)
    keeper = failed.Keeper(tmp_path)
    for _ in range(10 * failed.WAITING):
        keeper.keep(start_of("g7.0"), "it sank", "", "", None)
    keeper.close()
    goes_on.set()


def branched(name, *leaves, **told):
    """A trajectory whose history branches: `trajectory`'s `parts` for each leaf."""
    first, *others = (trajectory(name, parts, **told) for parts in leaves)
    branches = [p.Branch(t.tokens, t.mask, t.logprobs, t.versions) for t in others]
    made = first.response_tokens + sum(t.response_tokens for t in others)
    return msgspec.structs.replace(first, branches=branches, response_tokens=made)


def test_every_branch_of_a_trajectory_is_a_sample(run, shown):
    talk = branched("g3.0", ["go", "left"], ["go go", "again again again"], reward=0.5)
    saved = [[talk, trajectory("g3.1", ["go", "right right"], 1.0)]]
    replay.save(run, 3, saved)
    found, other = read(run, 3)
    assert [len(s.tokens) for s in found.samples] == [2, 5] and len(other.samples) == 1
    assert (found.made, found.length) == (talk.response_tokens, 7) == (4, 7)
    assert ("worst, longest", "g3.0") in [(why, each.id) for why, each in notable([found, other])]
    code, out, _ = shown("g3.0")
    assert code == 0 and "sample 2 of 2" in out and "again again again" in out
    code, out, _ = shown()
    assert re.search(r"g3\.0 +lake +0\.5 +1 +2 +7 +4 ", out), out
    html = conversations.html(run)
    assert "sample 2 of 2" in html and "again again again" in html


def test_turns_and_their_rewards_stand_beside_what_was_said(run, shown):
    told = dict(turn_tokens=[(0, 2), (1, 1), (2, 2)], turn_rewards=[0.25, 0.0, 0.75])
    talk = trajectory("g3.0", ["go go", "left <b> left", "wall", "right goal"], 1.0, **told)
    replay.save(run, 3, [[talk, trajectory("g3.1", ["go", "left"])]])
    [sample] = read(run, 3)[0].samples
    expected = [(-1, 2), (0, 2), (1, 1), (-1, 1), (2, 2)]  # Nothing was given before turn 1.
    assert [(part.turn, len(part.tokens)) for part in sample.parts()] == expected
    code, out, _ = shown("g3.0")
    assert code == 0 and "policy · turn 2, reward 0.75 · tokens 6 to 7 · version 4" in out
    assert "given · tokens 0 to 1" in out
    html = conversations.html(run)
    assert "turn 1, reward 0 · 1 tokens" in html


def test_what_a_model_says_is_printed_and_not_obeyed(run, capsys):
    stats = {"[/x]": 1.0, "[red]": 2.0}
    talk = trajectory("g3.0", ["go", WORDS[-1]], stats=stats)
    talk = msgspec.structs.replace(talk, domain="[/lake]")
    replay.save(run, 3, [[talk]])
    console = Console(force_terminal=True, color_system=None, width=140)
    for arguments in ((None, 3, False), ("g3.0", 3, False), ("g3.0", 3, True)):
        assert show.show(run, *arguments, console) == 0
    out = capsys.readouterr().out
    assert "[/x] 1, [red] 2" in out and out.count("[/lake]") == 3
    assert "\u241b[2J\ufffd1m\u2408" in out and not set(out) & {"\x1b", "\x9b", "\b"}


def test_a_tokenizer_that_is_damaged_or_gone_leaves_numbers(shown, tmp_path):
    tokenizer = tmp_path / "model" / "tokenizer.json"
    for spoil in (lambda: tokenizer.write_text("{"), tokenizer.unlink):
        spoil()
        code, out, err = shown("g1.0")
        assert code == 0 and "tokens are shown by their numbers" in err and "2 5" in out


def test_the_report_has_them_as_text_and_of_bounded_size(run, monkeypatch):
    html = build_report(run).read_text()
    assert "best: g1.0, lake; reward 1, solved; 2 turns, 4 of 7 tokens made" in html
    assert "<pre>left &lt;b&gt;</pre>" in html and "<pre>left <b></pre>" not in html
    assert html.count("<details><summary>Step ") == 2
    small = conversations.html(run)
    replay.save(run, 3, [[trajectory("g0.0", ["go", "left"] * 500)]])
    html = conversations.html(run)
    assert "The rest is left out here." in html
    assert html.count("<pre>") == small.count("<pre>") + conversations.MAX_PARTS
    for step in (3, 4):
        replay.save(run, step, [[trajectory("g0.0", ["go", "again " * 40_000], 1.0)]])
    for step in range(5, 403):
        replay.path_of(run, step).symlink_to(replay.path_of(run, 4))
    large = conversations.html(run)
    assert "characters …]" in large and "24 of 402 steps" in large
    assert "Step 1:" in large and "Step 402:" in large, "the first and the last are among them"
    most = conversations.MAX_STEPS * (4 * conversations.MAX_CHARACTERS + 4000)
    assert len(small) < len(large) < most


def test_a_damaged_step_leaves_the_report_whole(run):
    path = replay.path_of(run, 1)
    records = msgspec.msgpack.decode(path.read_bytes())
    records[0][0]["versions"] = records[0][0]["versions"][:-4]
    path.write_bytes(msgspec.msgpack.encode(records))
    html = build_report(run).read_text()
    assert f"{path}: holds no trajectories" in html and "differ in length" in html
    assert "Step 2: 5 trajectories" in html
