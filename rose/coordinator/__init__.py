"""The coordinator: step loop, turns, groups, borrowed ranks, provisioner and journal.

    coordinator.py   evaluate -> rollout -> train -> sync -> record -> checkpoint, step by step
         | waits for states, which one task changes as messages arrive:
    groups.py        TrajectoryFinished | TrajectoryFailed  -> groups; the scheduler takes batches
    turns.py         TurnRequest -> scheduler -> worker; TurnProgress ... TurnFinished -> host
    training.py      the batch -> trainer ranks; with trainer.stream group by group
    checkpoints.py   every rank's part on disk -> committed, beside the next steps
    borrowed.py      ranks that join, fall silent and leave; device_turns.py, hybrid_turns.py: whose
                     turn a GPU is
    provisioner.py   jobs that the scheduler asks for, and reward_jobs.py
         | every event goes to the scheduler, and every action comes back, through one queue
    rose.scheduler.actions.ActionQueue -> journal.py

The step loop waits for: the batch (groups.py unblocks it), trainer ranks (TrainDone), engines
(VersionLoaded), a checkpoint on disk. One rank without a GPU. It wires the parts, which don't know
it; only `rose.main`, the front door and the doctor import it.
"""
