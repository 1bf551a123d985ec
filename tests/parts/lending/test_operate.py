"""The operator's process: both children, signals, the report. The children are small programs."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from rose import config as configuration
from rose.config import ConfigError
from rose.parts.lending import serve, settings
from rose.parts.lending.board import Control, Reader
from rose.parts.lending.operator import operate
from rose.parts.lending.operator.control import BEAT_S
from tests import processes

PREDICTOR = {"coefficients": [0.01, 1e-4, 0.0, 1e-3, 0.0], "samples": 9, "ratios": [[1.0], [1.0]]}
PROFILE = {"online": {"predictor": PREDICTOR}}
SLO = "serving.online.slo={ttft_p50_s: 0.2, ttft_p99_s: 0.5, tpot_p50_s: 0.05, tpot_p99_s: 0.15}"

# A lender that says what it gets and ends as it is told: exits by folder/lender_ends, or on a
# signal, but for a first one where BUSY is set.
LENDER = """
import os, signal, sys, time
home = sys.argv[1]
def say(*words):
    with open(f"{home}/lender", "a") as file: print(*words, file=file)
def leave(number, _):
    say(signal.Signals(number).name)
    if not os.environ.pop("BUSY", ""):
        sys.exit(0)
for number in (signal.SIGTERM, signal.SIGUSR2): signal.signal(number, leave)
say("began", os.getpid(), os.environ["ROSE_COSERVING"])
while not os.path.exists(f"{home}/lender_ends"): time.sleep(0.02)
sys.exit(int(open(f"{home}/lender_ends").read()))
"""

PROGRAM = """
import sys
from pathlib import Path
from rose.parts.lending import serve, settings
from rose.parts.lending.operator import operate, server
from tests.parts.lending.test_server import Small
from tests.parts.lending.test_operate import LENDER
home, profile, *overrides = sys.argv[1:]
operate.OnlineServer, operate.BACK_OFF_S, server.POLL_S = Small, (0.05, 0.1), 0.02
operate.AGAIN_S = 0.05
operate.Operator.lender_command = lambda self: [sys.executable, "-c", LENDER, home]
made = operate.Operator(Path(home) / "outputs" / "run", overrides, settings.of_server(overrides), eval(profile))
print("boards", made.folder, flush=True)
sys.exit(made.run())
"""


class Running:
    def __init__(self, home: Path, overrides: list[str], profile: object, environment: dict):
        self.home, self.log = home, home / "log"
        (home / "outputs").mkdir(exist_ok=True)
        command = [sys.executable, "-u", "-c", PROGRAM, home, repr(profile), *overrides]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | environment
            )
        self.boards = Path(self.saying("boards ").split()[-1])

    def until(self, what, words: str):
        return processes.until(what, f"{words}:\n{self.log.read_text()}")

    def saying(self, words: str) -> str:
        lines = lambda: [s for s in self.log.read_text().splitlines() if words in s]  # noqa: E731
        return self.until(lines, words)[0]

    def lender(self, words: str, times: int = 1) -> str:
        path = self.home / "lender"
        said = lambda: path.exists() and path.read_text().count(words) >= times  # noqa: E731
        self.until(said, f"lender: {words}")
        return path.read_text()

    def control(self) -> Control:
        return self.until(lambda: Reader(self.boards / "control", Control).read(), "control")

    def status(self) -> dict:
        url = self.saying("operator's page").split("page ")[1].split("/report")[0]
        with urllib.request.urlopen(f"{url}/lending") as answer:
            return json.loads(answer.read())

    def told(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(processes.DEADLINE_S)


@pytest.fixture
def operator(tmp_path):
    started = []

    def start(*overrides, profile=PROFILE, **environment):
        given = ["serving.online.model=hub/model", "serving.online.port=0", *overrides]
        started.append(Running(tmp_path, given, profile, environment))
        return started[-1]

    yield start
    for running in started:
        running.process.kill()
        running.process.wait()


@pytest.mark.slow
def test_the_lender_begins_beside_the_server_and_both_leave_on_sigterm(operator, tmp_path):
    running = operator(SLO)
    text = running.lender("began")
    assert str(running.boards) in text and running.control().lend == 1
    config = json.loads((running.boards / "config.json").read_text())
    assert config["serving"]["online"]["model"] == "hub/model"
    assert running.told(signal.SIGTERM) == 0
    assert running.lender("SIGTERM") and not running.boards.exists()
    (home,) = (tmp_path / "outputs" / "serving").iterdir()
    assert not (home / "token").exists()
    assert "leaving, at SIGTERM" in (home / "report.html").read_text()
    assert (home / "online.log").read_text().startswith("hello")


@pytest.mark.slow
def test_signals_stop_and_start_lending_and_end_no_child_that_gets_them_too(operator, tmp_path):
    running = operator(SLO, BUSY="1")
    for pid in (running.lender("began").split()[1], (running.boards / "child").read_text()):
        # as Slurm may send it to every process of a step
        for number in (signal.SIGUSR1, signal.SIGRTMIN):
            os.kill(int(pid), number)
    told = lambda: re.findall(r"SIG\w+", (tmp_path / "lender").read_text())  # noqa: E731
    running.process.send_signal(signal.SIGUSR1)
    running.until(lambda: running.control().lend == 0, "stop")
    running.process.send_signal(signal.SIGRTMIN)
    running.until(lambda: running.control().lend == 1, "start")
    status = running.status()
    assert status["lend"] and status["why_not"] == ""
    assert status["online"]["up"] and status["rollout"]["lender"]
    # A mount that takes no report keeps nothing from ending.
    (home,) = (tmp_path / "outputs" / "serving").iterdir()
    os.mkfifo(home / "report.html.part")  # opening it waits for a reader
    # SIGUSR2 lets the lender finish, and a SIGTERM after it does not.
    running.process.send_signal(signal.SIGUSR2)
    running.until(lambda: told() == ["SIGUSR2"], "the lender is asked to finish")
    assert running.control().lend == 1 and running.told(signal.SIGTERM) == 0
    assert told() == ["SIGUSR2", "SIGTERM"]
    assert not running.boards.exists() and not (home / "token").exists()


FAST = SLO.replace("0.05", "0.001").replace("0.15", "0.002")


@pytest.mark.slow
@pytest.mark.parametrize(
    "profile, overrides, words",
    [
        (None, [SLO], "the default refuses to lend until a profile"),
        (PROFILE, [], "serving.online.slo is null"),
        (PROFILE, [FAST], "tpot_p99_s=0.002 s can't be met even alone"),
    ],
)
def test_without_profile_or_targets_nothing_is_lent(operator, profile, overrides, words, tmp_path):
    running = operator(*overrides, profile=profile)
    running.saying("serves hub/model")
    assert words in running.saying("nothing is lent") and running.control().lend == 0
    beat = running.control().beat
    running.until(lambda: running.control().beat > beat + 10 * BEAT_S, "ten more beats")
    assert not (tmp_path / "lender").exists()
    assert running.log.read_text().count("nothing is lent") == 1
    assert running.told(signal.SIGINT) == 0


@pytest.mark.slow
def test_a_lender_is_started_again_until_it_fails_and_then_the_server_serves_on(operator, tmp_path):
    def ends(code: str) -> None:
        (tmp_path / "written").write_text(code)
        (tmp_path / "written").rename(tmp_path / "lender_ends")  # never seen empty

    running = operator(SLO)
    first = int(running.lender("began").split()[1])
    os.kill(first, signal.SIGKILL)
    running.lender("began", times=2)
    assert "killed by SIGKILL" in running.saying("the lender was killed")
    # A lender exits with code 0 when its run is finished.
    ends("0")
    running.lender("began", times=4)
    assert running.log.read_text().count("no run to lend to now") == 1
    ends("1")
    assert "serves on" in running.saying("the lender ended with code 1")
    status = running.status()
    assert "the lender ended with code 1" in status["why_not"] and status["online"]["up"]
    running.until(lambda: running.control().lend == 0, "no more lending")
    assert running.process.poll() is None and running.told(signal.SIGTERM) == 0


@pytest.mark.slow
def test_a_server_that_can_not_start_ends_it_all_with_code_1(operator):
    running = operator(SLO, BROKEN="1")
    assert running.process.wait(processes.DEADLINE_S) == 1
    assert "wrong shape" in running.log.read_text() and not running.boards.exists()


@pytest.fixture
def boards(tmp_path, monkeypatch):
    """The folder in which devices claim theirs, in place of /dev/shm."""
    monkeypatch.setattr(operate.board, "folder", lambda name: tmp_path / "boards" / name)
    return tmp_path / "boards"


def test_two_devices_of_a_node_have_boards_of_their_own_and_what_was_left_is_removed(boards):
    first, lock = operate.claim("run")
    (first / "online").touch()
    second, other = operate.claim("run")
    assert first != second and first.stat().st_mode & 0o777 == 0o700
    lock.close()
    again, lock = operate.claim("run")
    assert again == first and not (first / "online").exists()
    lock.close(), other.close()


def test_a_folder_of_boards_that_leads_elsewhere_is_left_alone(boards):
    """Another user may make one in /dev/shm, under the name that it would have."""
    mine = boards / "mine"
    mine.mkdir(parents=True)
    (mine / "lock").write_text("kept")
    (mine / "file").touch()
    (boards / "run-0").symlink_to(mine)
    folder, lock = operate.claim("run")
    lock.close()
    assert folder == boards / "run-1" and (mine / "lock").read_text() == "kept"
    assert (mine / "file").exists()


@pytest.fixture
def operating(tmp_path, boards):
    """operating(overrides) -> an `Operator` that has not begun."""

    def make(*overrides):
        given = ["serving.online.model=hub/model", "serving.online.port=0", *overrides]
        (tmp_path / "run").mkdir(exist_ok=True)
        return operate.Operator(tmp_path / "run", given, settings.of_server(given), {})

    return make


def test_the_lender_gets_the_rollout_engines_scheduler_and_the_whole_budget(operating):
    def arguments(*overrides):
        return operating("serving.lending.kv_gib=3.0", *overrides).lender_command()

    assert arguments("cluster.gpus=0")[-2:] == [
        "rollout.kv_cache_gib=3.0",
        "rollout.engine_args.scheduler_cls=rose.parts.lending.vllm.rollout.scheduler",
    ]
    assert "rollout.kv_cache_gib=3.0" not in arguments("rollout.kv_cache_gib=0.5")
    assert "rollout.gpu_memory_utilization=" in " ".join(arguments("cluster.gpus=1"))


async def test_a_lender_may_drain_as_long_as_its_run_lets_it(operating, make_config):
    made = operating("serving.wait_s=1")
    # The run has not begun: the default of serving.drain_s applies.
    assert await made._drain_s() == 30.0
    configuration.save(make_config("serving.drain_s=7.5"), made.run_dir / "config.json")
    assert await made._drain_s() == 7.5
    assert await operating("serving.drain_s=3")._drain_s() == 3.0


@pytest.mark.parametrize("bad", ["file", "folder"])
def test_an_output_folder_that_takes_no_files_is_named_and_leaves_no_boards(
    tmp_path, monkeypatch, boards, capsys, bad
):
    monkeypatch.setattr(operate.OnlineServer, "check", lambda self: None)
    monkeypatch.setattr(settings, "online_folder", lambda online: online)
    home = tmp_path / "serving" / f"run-{socket.gethostname()}-0"
    if bad == "file":
        (tmp_path / "serving").touch()  # a file in place of the folder
    else:
        (home / "token.part").mkdir(parents=True)  # a folder in place of the file
    online = ["serving.online.model=hub/model", "serving.online.port=0", "cluster.gpus=0"]
    assert serve.main(["name=run", f"output_dir={tmp_path}", *online]) == 1
    said = capsys.readouterr().err
    assert f"rose serve: {home}" in said and "must be able to write there" in said
    assert not any(boards.iterdir())


def test_a_taken_control_port_is_refused_before_the_server_starts(operating):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        made = operating(f"serving.lending.control_port={taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match="serving.lending.control_port=.*in use"):
            made.run()
    assert made.server.starts == 0 and not made.folder.exists()
