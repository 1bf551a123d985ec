"""The terminal shows a run from its files: lines when piped, a live screen on a terminal, a table
at the end."""

import io
import time

from rich.console import Console
from rich.table import Table

from rose import places
from rose.observe import terminal
from rose.observe.metrics import MetricsWriter, read_metrics
from rose.observe.status import LiveStatus, Status, WorkerStatus
from rose.parts.report.report import build_report
from tests.observe.run_folder import write_run


def printed(*made) -> str:
    console = _console()
    for each in made:
        console.print(each)
    return console.file.getvalue()


def _console(**options) -> Console:
    return Console(file=io.StringIO(), width=100, **options)


def write(run, *rows, first=1):
    writer = MetricsWriter(run, tensorboard=False)
    for step, row in enumerate(rows, first):
        writer.write(step, row)
    writer.close()


def followed(run, *events) -> list[str]:
    """The lines that are printed while these happen, the last of them in the last moment."""
    LiveStatus(run).update(steps=5, phase="train")
    console, left = _console(), list(events)

    def stop() -> bool:
        left.pop(0)()
        return not left

    terminal.follow(run, stop, console)
    return console.file.getvalue().splitlines()


def test_piped_output_has_one_line_per_row_also_of_the_last_moment(tmp_path):
    run = tmp_path / "run"
    last = {"success": 0.5}
    lines = followed(run, lambda: write_run(run, steps=3), lambda: write(run, last, first=4))
    assert len(lines) == len(read_metrics(run)) == 7
    assert lines[0] == "step 0: held-out success 24.2% (95% 17.6% to 32.3%, 31 of 128)"
    assert lines[1].startswith("step 1/5: success ") and "tokens/s" in lines[1]
    assert "<b>lost</b>" in lines[4] and lines[-1] == "step 4/5: success 50.0%"


def test_a_run_that_goes_on_prints_no_line_of_an_earlier_attempt_again(tmp_path):
    run = tmp_path / "run"
    write(run, *[{"success": 0.1}] * 3)
    lines = followed(
        run,
        # The resumed run goes on from the checkpoint of step 1.
        lambda: MetricsWriter(run, tensorboard=False).truncate(after_step=1),
        lambda: write(run, {"success": 0.6}, first=2),
        lambda: write(run, {"success": 0.7}, first=3),
    )
    assert lines == ["step 2/5: success 60.0%", "step 3/5: success 70.0%"]


def test_the_live_screen_names_what_is_waited_for(tmp_path, monkeypatch):
    rows = read_metrics(write_run(tmp_path / "run", steps=8))
    now = time.time()
    monkeypatch.setattr(terminal.time, "time", lambda: now)
    workers = {"rollout-0": WorkerStatus(tokens_per_s=310.0, running=8, waiting=2, version=8)}
    counts = {"step": 9, "steps": 20, "finished": 13, "total": 64, "workers": workers}
    waiting = {"phase": "rollout", "waiting_for": "3 turns [of] rollout-1", "started": now - 65}
    status = Status(**counts, **waiting)
    text = printed(terminal.screen("my [run]", status, rows), terminal.screen("new", Status(), []))
    parts = ("my [run]", "step 9/20", "13/64 trajectories", "3 turns [of] rollout-1", "310")
    assert not [part for part in (*parts, "1:05 elapsed", "left", "step 8/20") if part not in text]
    terminal.follow(tmp_path / "absent", lambda: True, _console(force_terminal=True))


def test_the_final_table_compares_before_and_after(tmp_path):
    run = write_run(tmp_path / "run", steps=8)
    build_report(run)
    console = _console()
    terminal.final_table(run, console)
    text = console.file.getvalue()
    parts = ("before (step 0)", "24.2%", "17.6% to 32.3%", "after (step 8)", "75.8%", "+51.6 pp")
    assert not [part for part in (*parts, "report.html") if part not in text]
    assert text.splitlines()[-1].endswith(f"rose play {run} --before")
    terminal.final_table(tmp_path / "absent", console)


def test_the_command_that_is_named_is_one_that_can_be_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scripts = tmp_path / ".venv" / "bin"
    scripts.mkdir(parents=True)
    monkeypatch.setattr(places.sys, "executable", str(scripts / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert places.command() == f"{scripts / 'python'} -m rose"
    (scripts / "rose").write_text("#!/bin/sh\n")
    (scripts / "rose").chmod(0o755)
    assert places.command() == ".venv/bin/rose"
    monkeypatch.setenv("PATH", str(scripts))
    assert places.command() == "rose"


def test_the_curve_rises_with_the_values():
    lines = terminal.curve([0.0, 1.0], width=4, height=2, dots=False)
    assert lines == ["100% +  **", "  0% +*** "]  # the steep part is joined
    top, bottom = terminal.curve([0.0, 1.0, 1.0], width=2, height=2)
    assert bottom[-2] != "\u2800" and bottom[-1] == "\u2800" and top[-1] != "\u2800"


def test_a_table_is_as_wide_in_a_file_as_it_needs():
    made = Table(*(f"column {number}" for number in range(30)))
    made.add_row(*["a value"] * 30)
    console = _console()
    terminal.show(console, made)
    assert "column 0 ┃ column 1 ┃" in console.file.getvalue()
    assert console.file.getvalue().count("\n") == 5
    assert console.width == 100


def test_no_word_of_an_agents_program_reaches_the_terminal_as_a_command(tmp_path):
    nasty = "\x1b]0;title\x07\x1b[2J\x9b31m [link=http://x]y[/link]\r\x08end"
    row = {"kind": "fault", "step": 1, "what": f"a {nasty}", "detail": nasty}
    status = Status(phase="rollout", waiting_for=nasty)
    console = _console()
    console.print(terminal.screen("run", status, [row]))
    terminal.echo(console, terminal.describe(row, 2))
    terminal.echo(console, nasty)
    text = console.file.getvalue()
    assert text.count("end") >= 5 and "[link=http://x]y[/link]" in text
    assert all(char.isprintable() or char == "\n" for char in text), repr(text)


def test_steps_that_teach_nothing_are_said_once_as_long_as_it_lasts(tmp_path):
    run, norms = tmp_path / "run", (0.4, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0)
    rows = [{"grad_norm": norm, "reward_mean": 0.25, "groups_equal": 1.0} for norm in norms]
    lines = followed(run, lambda: write(run, *rows))
    [said] = [line for line in lines if "taught nothing" in line]
    assert "the last 3 steps" in said and "(mean 0.25)" in said
    screen = printed(terminal.screen("run", Status(steps=9), read_metrics(run)[:5]))
    assert screen.count("taught nothing") == 1
