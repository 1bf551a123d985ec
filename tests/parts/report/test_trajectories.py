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
from rose.places import REPOSITORY
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


def keep(run, name, made=None, output=""):
    start = p.StartTrajectory(name, name.split(".")[0], p.Phase.TRAIN, "lake", 8, None)
    keeper = failed.Keeper(run)
    keeper.keep(start, "it <b>sank</b>\x1b[2J", "row 7", output, made)
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
    replay.save(
        folder, 1, [[trajectory("g0.0", ["go", "left"]), trajectory("g0.1", ["go", "goal"])]]
    )
    second = [
        [
            trajectory("g1.0", ["go go", "left <b>", "wall", "right goal"], 1.0),
            trajectory("g1.1", ["go go", "left"], 0.25),
        ],
        [
            trajectory("g2.0", ["go", "again again again again again"], 0.5),
            trajectory("g2.1", ["go", "wall"], 0.0, truncated=True),
            trajectory("g2.2", ["go", "wall"], 0.1, invalid_calls=2),
        ],
    ]
    replay.save(folder, 2, second)
    return folder


def shown(run, *arguments, columns=140):
    """(exit code, stdout, stderr) of the command."""
    done = ran(
        [sys.executable, "-m", "rose", "show", str(run), *arguments],
        timeout=120,
        env={"COLUMNS": str(columns), "PATH": "", "PYTHONPATH": str(REPOSITORY)},
    )
    return done.returncode, done.stdout, done.stderr


def test_a_trajectory_is_its_runs_of_given_and_made_tokens(run):
    found = read(run, 2)[0]
    assert found.id == "g1.0" and found.made == 4 and found.length == 7
    parts = list(found.samples[0].parts())
    texts = Texts(run)
    assert [(part.made, part.start, texts.of(part.tokens)) for part in parts] == [
        (False, 0, "go go"),
        (True, 2, "left <b>"),
        (False, 4, "wall"),
        (True, 5, "right goal"),
    ]
    assert [part.of_versions for part in parts] == ["", "version 3", "", "version 4"]
    assert saved_steps(run) == [1, 2]


def test_the_few_that_tell_most_are_the_best_the_worst_the_longest_and_a_failed_one(run):
    expected = [("best", "g1.0"), ("worst, failed", "g2.1"), ("longest", "g2.0")]
    assert [(why, each.id) for why, each in notable(read(run, 2))] == expected
    assert notable([]) == []


@pytest.mark.slow
def test_the_list_and_the_conversation_as_the_command_prints_them(run):
    code, out, err = shown(run)
    assert code == 0 and err == "" and "Step 2: 5 trajectories" in out
    assert re.search(r"g1\.0 +lake +1 +2 +1 +7 +4 +3 to 4 solved", out), out
    assert re.search(r"g2\.1 .* not solved, cut by a limit", out)
    assert "2 unreadable calls" in out
    code, out, _ = shown(run, columns=80)
    assert code == 0 and "trajectory environment reward turns samples tokens made versions" in out
    assert "…" not in out and "unreadable" in out, out
    code, out, _ = shown(run, "g0.1")
    assert code == 0 and "step 1, group g0" in out and "goal" in out
    code, out, _ = shown(run, "g1.0")
    assert code == 0 and "policy · tokens 2 to 3 · version 3 · mean log-probability -0.500" in out
    assert out.index("go go") < out.index("left <b>") < out.index("wall") < out.index("right goal")


def test_those_that_failed_are_listed_and_shown_with_what_their_programs_printed(run, capsys):
    keep(run, "g7.0")
    keep(run, "g7.1", trajectory("g7.1", ["go", "left <b>"]), "no <i>water</i>\x1b[2J")
    assert show.main([str(run), "--failed"]) == 0
    out = capsys.readouterr().out
    assert "2 failed and replaced" in out and out.index("g7.0") < out.index("g7.1")
    assert "sank" in out and "row 7" in out and "\x1b" not in out
    keep(run, "g2.0")  # An earlier attempt failed here; step 2 has a good one.
    assert show.main([str(run), "g2.0"]) == 0 and "step 2" in capsys.readouterr().out
    assert show.main([str(run), "g2.0", "--failed"]) == 0 and "sank" in capsys.readouterr().out
    (run / "failed" / "g2.0.msgpack").unlink()
    assert show.main([str(run), "g7.1"]) == 0
    out = capsys.readouterr().out
    assert "failed and was replaced" in out and "task row 7: it <b>sank</b>" in out
    assert "left <b>" in out and "no <i>water</i>" in out and "\x1b" not in out
    assert show.main([str(run), "g7.0"]) == 0, "it has no tokens"
    html = conversations.html(run)
    assert "the newest 2 of 2" in html and "no &lt;i&gt;water" in html
    assert "it &lt;b&gt;sank" in html and "\x1b" not in html
    (run / "failed" / "g7.0.msgpack").write_bytes(b"\x80")  # a map without anything
    assert show.main([str(run), "--failed", "g7.0"]) == 1
    assert "no such trajectory failed" in capsys.readouterr().err
    assert show.main([str(run), "--failed"]) == 1
    assert "g7.0.msgpack: holds no trajectory" in capsys.readouterr().err
    assert "g7.0.msgpack: holds no trajectory" in conversations.html(run)


def test_a_run_without_a_step_lists_what_failed(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(SystemExit):
        show.main([str(run), "--failed"])
    keep(run, "g7.0")
    assert show.main([str(run)]) == 0 and "g7.0" in capsys.readouterr().out
    assert show.main([str(run), "g9.0"]) == 1
    assert "no such trajectory" in capsys.readouterr().err


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


def test_a_disk_that_hangs_holds_up_nobody(tmp_path, monkeypatch):
    goes_on = threading.Event()
    monkeypatch.setattr(failed, "write_whole", lambda *_: goes_on.wait())
    monkeypatch.setattr(failed, "CLOSE_S", 0.1)
    keeper = failed.Keeper(tmp_path)
    start = p.StartTrajectory("g7.0", "g7", p.Phase.TRAIN, "lake", 8, None)
    for _ in range(10 * failed.WAITING):
        keeper.keep(start, "it sank", "", "", None)
    keeper.close()
    goes_on.set()


def test_a_trajectory_may_stand_behind_options(run, capsys):
    for arguments in (["g0.1", "--step", "1"], ["--step", "1", "g0.1"]):
        assert show.main([str(run), *arguments]) == 0
        assert "step 1, group g0" in capsys.readouterr().out


def test_each_token_with_mask_version_and_probability(run):
    code, out, _ = shown(run, "g1.0", "--tokens")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and ["2", "2", "1", "3", "-0.5000", "left"] in lines
    assert ["4", "4", "0", "wall"] in lines


@pytest.mark.slow
def test_what_is_not_there_is_named(run, tmp_path):
    code, _, err = shown(run, "g9.9")
    assert code == 1 and "'g9.9': no such trajectory in steps 1 to 2; step 1 has g0.0, g0.1" in err
    code, _, err = shown(run, "--step", "7")
    assert code == 2 and "has steps 1 to 2" in err
    code, _, err = shown(tmp_path)
    assert code == 2 and "no rollouts/step-N.msgpack there" in err
    path = replay.path_of(run, 2)
    path.write_bytes(path.read_bytes()[:-9])
    code, _, err = shown(run)
    assert code == 1 and str(path) in err and "holds no trajectories" in err


def branched(name, *leaves, **told):
    """A trajectory whose history branches: `trajectory`'s `parts` for each leaf."""
    first, *others = (trajectory(name, parts, **told) for parts in leaves)
    branches = [p.Branch(t.tokens, t.mask, t.logprobs, t.versions) for t in others]
    made = first.response_tokens + sum(t.response_tokens for t in others)
    return msgspec.structs.replace(first, branches=branches, response_tokens=made)


@pytest.mark.slow
def test_every_branch_of_a_trajectory_is_a_sample(run):
    talk = branched("g3.0", ["go", "left"], ["go go", "again again again"], reward=0.5)
    saved = [[talk, trajectory("g3.1", ["go", "right right"], 1.0)]]
    replay.save(run, 3, saved)
    found, other = read(run, 3)
    assert [len(s.tokens) for s in found.samples] == [2, 5] and len(other.samples) == 1
    assert (found.made, found.length) == (talk.response_tokens, 7) == (4, 7)
    assert ("worst, longest", "g3.0") in [(why, each.id) for why, each in notable([found, other])]
    code, out, _ = shown(run, "g3.0")
    assert code == 0 and "sample 2 of 2" in out and "again again again" in out
    code, out, _ = shown(run)
    assert re.search(r"g3\.0 +lake +0\.5 +1 +2 +7 +4 ", out), out
    html = conversations.html(run)
    assert "sample 2 of 2" in html and "again again again" in html


def test_turns_and_their_rewards_stand_beside_what_was_said(run):
    told = dict(turn_tokens=[(0, 2), (1, 1), (2, 2)], turn_rewards=[0.25, 0.0, 0.75])
    talk = trajectory("g3.0", ["go go", "left <b> left", "wall", "right goal"], 1.0, **told)
    replay.save(run, 3, [[talk, trajectory("g3.1", ["go", "left"])]])
    [sample] = read(run, 3)[0].samples
    assert [(part.turn, len(part.tokens)) for part in sample.parts()] == [
        (-1, 2),
        (0, 2),
        (1, 1),  # nothing was given between these two
        (-1, 1),
        (2, 2),
    ]
    code, out, _ = shown(run, "g3.0")
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


def test_keys_of_a_later_release_do_no_harm(run):
    path = replay.path_of(run, 2)
    records = msgspec.msgpack.decode(path.read_bytes())
    records[0][0]["leaf"] = [1, 2]
    path.write_bytes(msgspec.msgpack.encode(records))
    assert read(run, 2)[0].made == 4


def test_a_tokenizer_that_is_damaged_or_gone_leaves_numbers(run, tmp_path):
    tokenizer = tmp_path / "model" / "tokenizer.json"
    for spoil in (lambda: tokenizer.write_text("{"), tokenizer.unlink):
        spoil()
        code, out, err = shown(run, "g1.0")
        assert code == 0 and "tokens are shown by their numbers" in err and "2 5" in out


def test_the_report_has_them_as_text_and_of_bounded_size(run, monkeypatch):
    html = build_report(run).read_text()
    assert "best: g1.0, lake; reward 1, solved; 2 turns, 4 of 7 tokens made" in html
    assert "<pre>left &lt;b&gt;</pre>" in html and "<pre>left <b></pre>" not in html
    assert html.count("<details><summary>Step ") == 2
    small = conversations.html(run)
    long = [[trajectory("g0.0", ["go", "again " * 40_000], 1.0)]]
    for step in range(3, 403):
        if step < 5:
            replay.save(run, step, long)
        else:
            replay.path_of(run, step).symlink_to(replay.path_of(run, 4))
    large = conversations.html(run)
    assert "characters …]" in large and "24 of 402 steps" in large
    assert "Step 1:" in large and "Step 402:" in large, "the first and the last are among them"
    most = conversations.MAX_STEPS * (4 * conversations.MAX_CHARACTERS + 4000)
    assert len(small) < len(large) < most


def test_many_short_parts_are_cut_too(run):
    talk = [[trajectory("g0.0", ["go", "left"] * 500)]]
    replay.save(run, 3, talk)
    shown_html = conversations._step(run, 3, Texts(run))
    assert shown_html.count("<pre>") == conversations.MAX_PARTS
    assert "The rest is left out here." in shown_html


def test_a_damaged_step_leaves_the_report_whole(run):
    path = replay.path_of(run, 1)
    records = msgspec.msgpack.decode(path.read_bytes())
    records[0][0]["versions"] = records[0][0]["versions"][:-4]
    path.write_bytes(msgspec.msgpack.encode(records))
    html = build_report(run).read_text()
    assert f"{path}: holds no trajectories" in html and "differ in length" in html
    assert "Step 2: 5 trajectories" in html
