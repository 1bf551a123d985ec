"""Driver of a scheduler in place of engines, environments, a trainer and a job queue. It feeds
events in any order, without time, and checks that each action is possible."""

from dataclasses import dataclass, field

import msgspec

from rose.coordinator.journal import Entry
from rose.scheduler import events as ev
from rose.scheduler.actions import ActionQueue
from rose.scheduler.groups import group_index
from tests.scheduler.said import asked, joined, lends

MEMBERS = 2  # trajectories of a group
GROUPS = 2  # groups of a step
WHOLE_KV = 100
KINDS = {"d0": ("dedicated", "H800"), "d1": ("dedicated", "H20"), "c0": ("cooperative", "H800")}
KINDS |= {"c1": ("cooperative", "H20"), "s0": ("spot", "H800"), "h0": ("hybrid", "H800")}


@dataclass
class Worker:
    kind: str
    version: int
    resting: bool
    sequences: int = 3
    kv: int = WHOLE_KV
    loading: bool = False
    draining: bool = False
    awaits_capacity_report: bool = False
    held: dict[str, int] = field(default_factory=dict)  # turn -> KV tokens

    def can_take(self, need: int, queue_depth: float) -> bool:
        if not self.held:
            return self.sequences > 0 and self.kv > 0 and (need <= self.kv or self.kv >= WHOLE_KV)
        has_place = len(self.held) < self.sequences * (1 + queue_depth)
        return has_place and sum(self.held.values()) + need <= self.kv


@dataclass
class Turn:
    trajectory: str
    context: int
    new: int
    made: int = 0
    attempt: int = 0
    worker: str | None = None
    chunk_ends: int = 0


@dataclass
class Group:
    version: int  # version at its admission
    left: dict[str, int]  # unfinished trajectory -> turns that it has left
    state: str = "running"  # running, finished, trained or dropped


class Driver:
    def __init__(self, scheduler, queue_depth, staleness, lengths):
        self.s, self.queue_depth = scheduler, queue_depth
        self.staleness, self.lengths = staleness, lengths
        self.queue = ActionQueue(scheduler, self.carry_out, self)
        self.snapshot = msgspec.json.decode(msgspec.json.encode(scheduler.snapshot()))
        self.journal: list[Entry] = []
        self.at, self.version, self.step, self.serial, self.stalls = 0.0, 0, 0, 0, 0
        self.held_out = 0  # turns whose pick is divisible by it are of an evaluation, if not 0
        self.trainer = "free"  # free, wants a batch, or trains
        self.early = []  # groups that the trainer of a streaming step has received
        self.over = False  # True once the scheduler has stopped the run
        self.workers: dict[str, Worker] = {}
        self.turns: dict[str, Turn] = {}
        self.groups: dict[str, Group] = {}
        self.asked: dict[str, int] = {}  # turn to be requested -> its context
        self.requests: dict[str, bool] = {}
        self.hosts: set[str] = set()  # environment hosts
        self.saved: dict[str, str] = {}  # trajectory with a snapshot -> host
        self.feed(ev.VersionPublished, version=0)

    # ----------------------------------------------------------------- the scheduler's actions

    def feed(self, kind, /, **fields):
        self.queue.feed(kind(at=self.at, **fields))

    def write(self, event, actions):
        self.journal.append(Entry(event, actions))

    def carry_out(self, action):
        getattr(self, f"do_{type(action).__name__}")(action)

    def do_AssignTurn(self, a):
        if a.turn not in self.turns:
            return  # An earlier action has dropped its group.
        turn, worker = self.turns[a.turn], self.workers[a.worker]
        assert turn.worker is None and a.attempt == turn.attempt + 1, "a turn is with one worker"
        assert worker.version == self.version and not worker.loading, "turns run on new weights"
        assert not (worker.draining or worker.resting or worker.awaits_capacity_report)
        left = turn.new - turn.made
        assert 0 <= a.max_tokens < left
        need = turn.context + turn.made + (a.max_tokens or left)
        assert worker.can_take(need, self.queue_depth), "no worker is over its cap"
        turn.worker, turn.attempt = a.worker, a.attempt
        turn.chunk_ends = turn.made + a.max_tokens if a.max_tokens else 0
        worker.held[a.turn] = need

    def do_AbortTurn(self, a):
        if a.turn not in self.turns:
            return  # An earlier action has dropped its group.
        assert self.turns[a.turn].worker == a.worker and self.turns[a.turn].attempt == a.attempt
        self.take(a.turn)

    def do_LoadWeights(self, a):
        worker = self.workers[a.worker]
        assert not (worker.loading or worker.resting or worker.draining)
        assert a.version == self.version
        worker.loading = True

    def do_AdmitGroup(self, a):
        assert a.group not in self.groups, "names of groups are never reused"
        assert group_index(a.group) == a.index
        members = [f"{a.group}.{i}" for i in range(MEMBERS)]
        turns = {m: 1 + self.length(2 * i) % 3 for i, m in enumerate(members)}
        self.groups[a.group] = Group(self.version, turns)
        for member in members:
            self.asked[f"{member}.t0"] = 1 + self.length(len(member)) % 40

    def do_DropGroup(self, a):
        group = self.groups[a.group]
        assert group.state in ("running", "finished"), "a trained or dropped group isn't dropped"
        group.state = "dropped"
        for trajectory in list(group.left):
            self.cancel(trajectory)

    def do_TrainGroup(self, a):
        assert (self.trainer, a.step) == ("wants a batch", self.step)
        assert self.groups[a.group].state == "finished" and a.group not in self.early
        self.early.append(a.group)

    def do_StartTraining(self, a):
        assert (self.trainer, a.step) == ("wants a batch", self.step) and len(a.groups) == GROUPS
        assert set(self.early) <= set(a.groups), "groups trained early are in the batch"
        self.early = []
        for name in a.groups:
            group = self.groups[name]
            assert group.state == "finished", "every group is trained once, when it is finished"
            assert self.version - group.version <= self.staleness
            group.state = "trained"
        self.trainer = "trains"

    def do_RequestCapacity(self, a):
        assert a.request not in self.requests
        self.requests[a.request] = False

    def do_ReleaseCapacity(self, a):
        self.end_request(a.request)

    def do_UseWorker(self, a):
        self.workers[a.worker].resting = False

    def do_RestWorker(self, a):
        self.workers[a.worker].resting = True

    def do_MoveTrajectory(self, a):
        assert a.trajectory in self.saved, "only a trajectory with a snapshot moves"
        assert a.host in self.hosts and a.host != self.saved[a.trajectory]
        self.saved[a.trajectory] = a.host

    def do_GiveUp(self, a):
        self.over = True

    # ----------------------------------------------------------------- events

    def length(self, salt):
        self.serial += 1
        return self.lengths[(self.serial * 7 + salt) % len(self.lengths)]

    def take(self, name):
        turn = self.turns[name]
        if turn.worker is not None:
            del self.workers[turn.worker].held[name]
        turn.worker = None

    def join(self, name, version):
        kind, hardware = KINDS.get(name, ("serverless", "H20"))
        self.at_worker(name, "lose")
        self.workers[name] = Worker(kind, version, self.s.joins_resting(kind))
        self.queue.feed(joined(name, 3, WHOLE_KV, kind, self.at, version, hardware=hardware))

    def at_worker(self, name, what, kv=WHOLE_KV, sequences=3):
        worker = self.workers.get(name)
        if worker is None:
            return
        match what:
            case "lose":
                held = list(worker.held)
                for turn in held:
                    self.take(turn)
                ended = [t for t in held if self.turns[t].made >= self.turns[t].new]
                after = [self.after(t) for t in ended]
                del self.workers[name]
                self.feed(ev.WorkerLost, worker=name, reason="gone", ended=ended)
                for go_on in after:
                    go_on()
            case "drain":
                worker.draining = True
                self.feed(ev.WorkerDraining, worker=name)
            case "load" if worker.loading:
                worker.loading, worker.version = False, self.version if kv else worker.version
                self.feed(ev.WorkerLoaded, worker=name, version=worker.version)
            case "capacity":
                worker.kv, worker.sequences, worker.awaits_capacity_report = kv, sequences, False
                self.queue.feed(lends(name, kv, sequences, self.at, -1.0, kv < WHOLE_KV))

    def request(self, pick):
        if not self.asked:
            return
        name = list(self.asked)[pick % len(self.asked)]
        context = self.asked.pop(name)
        turn = self.turns[name] = Turn(name.rpartition(".")[0], context, 1 + self.length(pick) % 80)
        domain, outcome = ("maths", "web")[self.serial % 2], ("", "ok", "failed")[self.serial % 3]
        more = {"domain": domain, "outcome": outcome}
        more["held_out"] = self.held_out > 0 and pick % self.held_out == 0
        self.queue.feed(asked(name, self.at, context, turn.new, **more))

    def held(self):
        return [turn for turn in self.turns.values() if turn.worker is not None]

    def at_turn(self, pick, what, count):
        held = [name for name, turn in self.turns.items() if turn.worker is not None]
        if not held:
            return False
        name = held[pick % len(held)]
        turn = self.turns[name]
        made = min(count, (turn.chunk_ends or turn.new) - turn.made)
        if made:
            turn.made += made
            self.feed(ev.TurnProgressed, turn=name, attempt=turn.attempt, tokens=made)
        match what:
            case "end":
                self.take(name)
                go_on = self.after(name)
                self.feed(ev.TurnEnded, turn=name, tokens=turn.made)
                go_on()
            case "return" if turn.made < turn.new:
                worker = self.workers[turn.worker]
                chunk = 0 < turn.chunk_ends == turn.made
                worker.awaits_capacity_report |= not chunk
                self.take(name)
                self.feed(ev.TurnReturned, turn=name, attempt=turn.attempt, chunk=chunk)
            case "late message":
                self.feed(ev.TurnProgressed, turn=name, attempt=turn.attempt - 1, tokens=3)
                self.feed(ev.TurnReturned, turn=name, attempt=turn.attempt - 1)
        return True

    def after(self, name):
        """Remove the turn, and return a function that continues its trajectory."""
        turn = self.turns.pop(name)
        group = turn.trajectory.partition(".")[0]

        def go_on():
            left = self.groups[group].left
            if turn.trajectory not in left:
                return  # It was cancelled.
            left[turn.trajectory] -= 1
            number = int(name.rpartition(".t")[2])
            if left[turn.trajectory]:
                self.asked[f"{turn.trajectory}.t{number + 1}"] = turn.context + turn.made
            else:
                self.end_trajectory(turn.trajectory, turn.made)

        return go_on

    def end_trajectory(self, trajectory, tokens):
        name = trajectory.partition(".")[0]
        group = self.groups[name]
        del group.left[trajectory]
        self.saved.pop(trajectory, None)
        self.feed(ev.TrajectoryEnded, trajectory=trajectory, tokens=tokens)
        if not group.left and group.state == "running":
            group.state = "finished"
            self.feed(ev.GroupFinished, group=name, accepted=self.length(0) % 4 > 0)

    def cancel(self, trajectory):
        del self.groups[trajectory.partition(".")[0]].left[trajectory]
        asked = self.asked.items()
        self.asked = {turn: c for turn, c in asked if turn.rpartition(".")[0] != trajectory}
        for name in [n for n, turn in self.turns.items() if turn.trajectory == trajectory]:
            self.take(name)
            made = self.turns.pop(name).made
            self.feed(ev.TurnEnded, turn=name, tokens=made)
        self.saved.pop(trajectory, None)
        self.feed(ev.TrajectoryEnded, trajectory=trajectory)

    def at_host(self, pick, count):
        """Let a host report its load, save a trajectory, or die."""
        host, known = f"e{pick % 3}", sorted(self.s.cluster.group_of)
        if pick == 7:
            self.hosts.discard(host)
            self.saved = {name: at for name, at in self.saved.items() if at != host}
            self.feed(ev.HostLost, host=host)
        elif pick % 2 and known:
            trajectory = known[count % len(known)]
            self.saved[trajectory] = host
            saved = {"trajectory": trajectory, "host": host, "turns": 1}
            self.feed(ev.TrajectorySaved, **saved, commands_s=float(count))
        else:
            self.hosts.add(host)
            load = {"running": count % 9, "cores": 2.0, "cpu": count / 3, "memory": pick / 7}
            self.feed(ev.HostLoad, host=host, **load)

    def fail(self, pick):
        """Let an environment fail, and replace its trajectory by another."""
        running = [(g, t) for g in self.groups.values() if g.state == "running" for t in g.left]
        if running:
            group, trajectory = running[pick % len(running)]
            replacement = f"{trajectory}r{self.serial}"
            group.left[replacement] = 1
            self.cancel(trajectory)
            if group.state == "running":
                self.asked[f"{replacement}.t0"] = 5

    def train(self):
        if self.trainer == "free":
            self.step += 1
            self.trainer = "wants a batch"
            stream = self.step % 2 == 0
            self.feed(ev.StepBegun, step=self.step, groups=GROUPS, stream=stream)
        elif self.trainer == "trains":
            self.version += 1
            self.trainer = "free"
            self.feed(ev.VersionPublished, version=self.version)
        else:
            return False
        return True

    def tick(self, seconds):
        """End the turns that have all their tokens, then let time pass."""
        while complete := [i for i, turn in enumerate(self.held()) if turn.made == turn.new]:
            self.at_turn(complete[0], "end", 0)
        self.at += seconds
        self.feed(ev.Tick)

    def answer(self, pick, what):
        """Grant, refuse or end a capacity request, if that is possible now."""
        if not self.requests:
            return
        name = list(self.requests)[pick % len(self.requests)]
        match what % 3:
            case 0 if not self.requests[name]:
                self.requests[name] = True
                self.feed(ev.CapacityGranted, request=name)
                self.join(f"{name}-worker", -1)
            case 1 if not self.requests[name]:
                del self.requests[name]
                self.feed(ev.CapacityRefused, request=name, reason="full")
            case 2 if self.requests[name]:
                self.end_request(name)

    def end_request(self, name):
        del self.requests[name]
        self.at_worker(f"{name}-worker", "drain")
        self.at_worker(f"{name}-worker", "lose")
        self.feed(ev.CapacityEnded, request=name)

    # ----------------------------------------------------------------- progress to the end

    def restore(self):
        """Make every worker join, with its whole capacity and the newest weights."""
        for name in KINDS:
            if name not in self.workers or self.workers[name].draining:
                self.join(name, self.version)
            self.at_worker(name, "capacity")
        self.load()

    def load(self):
        for name in list(self.workers):
            self.at_worker(name, "load")

    def settle(self):
        """Assert that every waiting turn gets a worker if no further ones arrive. That takes at
        most as many steps of `work` as turns and chunks can end."""
        waiting = [name for name, turn in self.turns.items() if turn.worker is None]
        for _ in range(sum(1 + turn.new for turn in self.turns.values())):
            self.load()
            left = [name for name in waiting if name in self.turns]
            waiting = [name for name in left if self.turns[name].worker is None]
            if not waiting:
                return
            self.work()
        assert not waiting, "a turn starves"

    def work(self):
        """End one more turn, or a chunk of it. While no turn runs, trajectories whose tools have
        returned request turns, and time passes."""
        for _ in range(100):
            held = self.held()
            if held:
                return self.at_turn(0, "return" if held[0].chunk_ends else "end", 1000)
            self.request(0)
            self.tick(5.0)
            self.load()
        raise AssertionError(f"all workers are there, and none gets any of {len(self.turns)} turns")

    def finish(self, steps):
        """Run until `steps` more steps are in training."""
        goal = self.step + steps
        for _ in range(2000):
            if self.step >= goal and self.trainer == "trains":
                return
            self.train()
            self.load()
            while self.asked:
                self.request(0)
            if self.turns:
                self.work()
        raise AssertionError(f"step {self.step} never gets its batch")

    def replay(self, fresh):
        fresh.restore(self.snapshot)
        decoder, encoder = msgspec.json.Decoder(Entry), msgspec.json.Encoder()
        for line in map(encoder.encode, self.journal):
            entry = decoder.decode(line)
            assert fresh.handle(entry.event) == entry.actions
