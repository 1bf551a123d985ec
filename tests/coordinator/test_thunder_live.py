"""ThunderAgent's policy drives the live coordinator: trajectories wait whole where engines have
little memory, and the journal replays to the same decisions."""

from rose.coordinator import journal
from rose.observe.metrics import read_metrics, rows_of
from rose.policies import build
from rose.scheduler import events as ev
from tests.coordinator import peers

KV_TOKENS = 500  # of an engine: a trajectory needs 100 and more, an engine takes 4 turns


def test_programs_wait_for_memory_and_the_run_goes_on(make_config, tmp_path, monkeypatch):
    def ready(self, rank, incarnation):
        return peers.p.WorkerReady(
            f"rollout-{rank.index}", incarnation, 4242, 4, KV_TOKENS, -1, "cpu"
        )

    monkeypatch.setattr(peers.Peers, "ready", ready)
    config = make_config(
        "scheduler/routing=thunder scheduler/order=shortest_first",
        "scheduler.routing.args.period_s=0.001 scheduler.routing.args.half_life_s=1e9",
        "trainer.steps=2 trainer.batch_size=16 rollout.group_size=4 env.max_new_tokens=8",
        "serving.borrow=false observe.tensorboard=false observe.save_trajectories=false",
    )
    peers.run(config, tmp_path, seed=1)
    assert [row["step"] for row in rows_of(read_metrics(tmp_path), "step")] == [1, 2]
    [path] = (tmp_path / "journal").iterdir()
    scheduler = build(config.scheduler, config.rollout.turn_timeout_s)
    assert journal.replay(path, scheduler) > 100
    waited, running = 0, set()
    entries = journal.read(path)
    next(entries)
    for entry in entries:
        given = {a.turn for a in entry.actions if isinstance(a, ev.AssignTurn)}
        running |= given
        match entry.event:
            case ev.TurnRequested(turn=turn):
                waited += turn not in given and len(running) < 4
            case ev.TurnEnded(turn=turn):
                running.discard(turn)
    assert waited, "an engine had places for turns that waited: it was memory that they waited for"
