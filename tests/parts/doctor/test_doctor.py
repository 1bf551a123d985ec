"""What the doctor says of a part that works, and of one that doesn't."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rose.parts.doctor import __main__ as command
from rose.parts.doctor import finding as findings
from rose.parts.doctor import join, machine, rank, slurm
from rose.parts.doctor.finding import Child, Ended, run
from rose.parts.doctor.machine import world
from tests.parts.doctor.conftest import check, ended


def test_a_folder_that_cannot_hold_runs_is_named(tmp_path):
    assert machine.file_system(tmp_path / "runs").state in ("ok", "warning")
    assert list((tmp_path / "runs").iterdir()) == []
    (tmp_path / "file").touch()
    found = machine.file_system(tmp_path / "file" / "runs")
    check(found, "failed", str(tmp_path / "file"), "folder that you may write")


def test_a_package_that_does_not_import_is_named_and_told_from_one_that_takes_too_long(monkeypatch):
    check(machine.package("h5py"), "ok")
    name = "rose_has_no_such_package"
    check(machine.package(name), "failed", name, "make gpu")
    monkeypatch.setattr(machine, "IMPORT_S", 0.0)
    check(machine.package("torch"), "failed", "no end within 0 s", "faster file system")


def test_events_are_found_where_a_launcher_joined_or_cut_the_lines():
    one, other = {"what": "world", "size": 2, "in": {"a": "}"}}, {"what": "world", "size": 3}
    one_text, text = json.dumps(one), json.dumps(other)
    words = f"noise{one_text}{text}\n\n[1]\nsrun: {one_text[:20]}\n{text}"
    assert Ended(0, words, "").events() == [one, other, other]


def test_a_process_is_asked_to_end_then_ended_and_its_words_stay():
    polite = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); "
    polite += "print('here', flush=True); time.sleep(600)"
    began = time.monotonic()
    with Child([sys.executable, "-c", polite]) as child:
        assert child.until(lambda so_far: "here" in so_far.out, 120.0)
        said = child.wait(0.1)
    assert (said.code, said.out, said.last) == (124, "here\n", "no end within 0.1 s")
    assert time.monotonic() - began < 600.0, "it did not end by itself"
    failed = run(["sh", "-c", "echo why >&2; echo 'srun: error: n1: task 0' >&2; exit 3"])
    assert failed.last == "why"


def ranks(*sizes):
    return [{"what": "world", "size": size, "library": "MPICH   5"} for size in sizes]


@pytest.mark.parametrize(
    ("done", "state", "words"),
    [
        (ended(*ranks(2, 2)), "ok", "MPICH 5"),
        (ended(*ranks(1, 1)), "failed", "2 ranks, each in a world of 1"),
        (ended(*ranks(2)), "failed", "1 ranks"),
        (ended(err="srun: error: no", code=1), "failed", "srun: error: no"),
        (Ended(3, "", ""), "failed", "exit code 3"),
    ],
)
def test_one_world_is_two_ranks_that_know_of_each_other(done, state, words):
    check(world(done, "srun", "ask"), state, words)


def side(node, *round_trips, **said):
    return {"what": "files", "node": node, "round_trips": round_trips} | said


@pytest.mark.parametrize(
    ("sides", "state", "words"),
    [
        ([side("n1", *[0.02] * 5), side("n2", 0.5)], "ok", "n1 is seen on n2 after 10 ms"),
        ([side("n1", *[6.0] * 5), side("n2", *[6.0] * 5)], "warning", "3000 ms"),
        ([side("n1", 0.02), side("n1", 0.02)], "warning", "both components ran on n1"),
        ([side("n2", missing="/tmp/x")], "failed", "n2 did not see /tmp/x within 10 s"),
        ([], "warning", "not tried"),
    ],
)
def test_files_are_shared_when_each_side_sees_the_others(sides, state, words):
    check(rank.files(ended(*sides), Path("/tmp")), state, words)


def test_two_sides_see_each_others_files(tmp_path, monkeypatch):
    answers = "import sys; from pathlib import Path; from rose.parts.doctor import rank; "
    answers += "rank.SEEN_S = 120.0; print('up', flush=True); "
    answers += "print(len(rank.exchange(Path(sys.argv[1]), 1)['round_trips']))"
    command = [sys.executable, "-c", answers, str(tmp_path)]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "up\n"
    monkeypatch.setattr(rank, "SEEN_S", 120.0)
    took = rank.exchange(tmp_path, 0)["round_trips"]
    assert other.communicate(timeout=600)[0] == f"{rank.ROUNDS}\n"
    assert len(took) == rank.ROUNDS and all(seconds > 0 for seconds in took)
    monkeypatch.setattr(rank, "SEEN_S", 0.1)
    assert rank.exchange(tmp_path / "elsewhere", 0) == {"missing": str(tmp_path / "elsewhere")}
    (alone := tmp_path / "alone").mkdir()
    assert rank.exchange(alone, 1) == {"missing": str(alone / "ask-0")}


def story(*without):
    """What the coordinator's side says when all is well, but for the events named."""
    events = [{"what": "open"}]
    for worker in ("borrowed-1", "borrowed-2"):
        detail = f"{worker}: on n2, 1.0 s after it asked"
        events += [{"what": "joined", "worker": worker, "detail": detail}]
        events += [{"what": "received", "worker": worker}]
    events += [{"what": "left", "worker": "borrowed-2", "detail": "borrowed-2: done"}]
    events += [{"what": "lost", "worker": "borrowed-1", "seconds": 2.04}]
    left = [event for event in events if (event["what"], event.get("worker")) not in without]
    return [event | {"node": "n1"} for event in left]


def joiner(node="n2"):
    return ended({"what": "started", "node": node})


def test_a_join_that_survives_a_kill_tells_the_times():
    found = join.joined(ended(*story()), joiner(), two_nodes=True)
    check(found, "ok", "one of n2 joined n1 (1.0 s after it asked)")
    assert "2.0 s after its last message" in found.words
    check(join.joined(ended(*story()), joiner("n1"), two_nodes=True), "warning")
    check(join.joined(ended(*story()), joiner("n1"), two_nodes=False), "ok")


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (("joined", "borrowed-1"), "no rank could join"),
        (("received", "borrowed-1"), "no message of it arrived"),
        (("lost", "borrowed-1"), "went unnoticed"),
        (("joined", "borrowed-2"), "no other rank could join"),
        (("left", "borrowed-2"), "could not leave"),
    ],
)
def test_what_did_not_happen_is_named_with_the_reason(missing, words):
    fault = {"what": "fault", "node": "n1", "detail": "its porter was not up"}
    found = join.joined(ended(*story(missing), fault), joiner(), two_nodes=True)
    check(found, "failed", f"{words}: its porter was not up", "cluster.mpi.join=false")
    mpi = ended(*story(missing), fault, err="porter: Exception: not supported with ucx")
    assert "not supported with ucx" in join.joined(mpi, joiner(), two_nodes=True).words
    host = ended(err="FileNotFoundError: 'config.json'", code=1)
    found = join.joined(host, Ended(1, "", ""), two_nodes=True)
    check(found, "failed", "did not start: FileNotFoundError")


@pytest.mark.slow
def test_an_all_reduce_is_checked_and_timed():
    """The program that NCCL is tried with, on the CPU's backend."""
    command = [sys.executable, "-m", "rose.parts.doctor.all_reduce", "gloo", "2"]
    done = run(command, deadline_s=240.0)
    assert done.code == 0, done.err
    check(machine.reduced(done, 2), "ok", "GiB/s bus bandwidth")
    failed = ended(err="RuntimeError: NCCL error: unhandled system error", code=1)
    check(machine.reduced(failed, 8), "failed", "unhandled system error", "NCCL_DEBUG")


@pytest.mark.parametrize(("variable", "tried"), [("4,5", [2]), ("6", []), (None, [8]), ("9", [])])
def test_nccl_is_tried_between_the_gpus_that_were_given_with_the_variables_of_ranks(
    make_config, nvidia_smi, monkeypatch, variable, tried
):
    nvidia_smi(variable=variable)
    monkeypatch.setattr(machine.devices, "examine", lambda c: [])
    asked = []
    tries = lambda argv, env, _: asked.append((argv, env)) or ended(code=1)  # noqa: E731
    monkeypatch.setattr(machine, "run", tries)
    found = machine.gpus(make_config("+cluster.env.NCCL_P2P_DISABLE='1'"))
    assert [int(argv[-1]) for argv, _ in asked] == tried
    # The remedy that it gives is tried, too.
    assert all(env["NCCL_P2P_DISABLE"] == "1" for _, env in asked)
    if variable == "9":
        check(found[0], "failed", "no GPU is called '9'")


def test_jobs_on_gpus_have_the_time_and_the_cpus_that_imports_take_there(make_config, monkeypatch):
    """The check on the node waits IMPORT_S for torch: its job, and the wait for it, last longer."""
    asked = []
    runs = lambda argv, env, deadline_s: asked.append((argv, deadline_s)) or ended()  # noqa: E731
    monkeypatch.setattr(slurm, "run", runs)
    monkeypatch.setattr(machine, "run", runs)
    c = make_config("+experiment=qwen7b cluster=slurm")
    assert c.cluster.slurm.trainer.mem == "0", "all: but the doctor's jobs stand beside others"
    assert "--mem" not in " ".join(findings.gpu_task(c, c.cluster.slurm.trainer, 4))
    trainer = "cluster.slurm.trainer.gpus_per_node=4 cluster.slurm.trainer.mem=200G"
    slurm.gpus(make_config(f"+experiment=qwen7b cluster=slurm {trainer}"))
    assert ["rose.parts.doctor.devices" in argv for argv, _ in asked] == [True, False]
    for argv, deadline_s in asked:
        [minutes] = [int(each[7:]) for each in argv if each.startswith("--time=")]
        assert minutes * 60 > machine.IMPORT_S
        assert deadline_s >= findings.QUEUE_S + machine.IMPORT_S
        assert {"--gpus-per-node=4", "--cpus-per-task=8", "--mem=200G"} <= set(argv)


MOUNT = "cluster.slurm.container={runtime: apptainer, image: /i, python: /p, mounts: [], args: []}"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["cluster.kind=pbs"], "cluster.kind='pbs'"),
        (["cluster=nowhere"], "cluster=nowhere"),
        (["-m", "seed=1,2"], "no sweep"),
        (["cluster=slurm", "output_dir=/a:b", MOUNT], "/a:b can't be mounted"),
    ],
)
def test_bad_overrides_are_refused_with_code_2(monkeypatch, capsys, overrides, words):
    monkeypatch.setattr(sys, "argv", ["doctor", *overrides])
    assert command.main() == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("given", ["output_dir=~/runs", "--folder=~/runs"])
@pytest.mark.parametrize("state, code", [("ok", 0), ("warning", 0), ("failed", 1)])
def test_what_failed_of_a_folder_is_printed_with_its_remedy_and_has_code_1(
    monkeypatch, capsys, tmp_path, state, code, given
):
    found = [findings.Finding("ok", "import vllm", "0.32")]
    said = "srun --mpi", "no pmi9 here, only [pmix].", "set cluster.mpi.srun"
    found += [findings.Finding(state, *said)]
    examined = []
    examine = lambda c, folder: examined.append(folder) or iter(found)  # noqa: E731
    monkeypatch.setattr(command, "examine", examine)
    monkeypatch.setattr(sys, "argv", ["doctor", given])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert command.main() == code and examined == [tmp_path / "runs"]
    line = f"{state:8} srun --mpi: no pmi9 here, only [pmix]; set cluster.mpi.srun"
    assert capsys.readouterr().out.splitlines() == ["ok       import vllm: 0.32", line]


# The command, whose checks may take minutes, as on a busy machine.
PATIENT = """
import sys
from rose.parts.doctor import __main__ as command, finding, join
finding.run.__defaults__ = (None, 480.0)
join.OPEN_S = join.JOIN_S = 480.0
sys.exit(command.main())
"""


@pytest.mark.slow
def test_this_machine_works(tmp_path):
    options = ["--folder", str(tmp_path), "serving.lost_after_s=20"]
    command = [sys.executable, "-c", PATIENT, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("import vllm", "import deepspeed", "one MPI world, mpiexec", join.PART):
        assert f"ok       {part}" in done.stdout
    assert list(tmp_path.iterdir()) == []
