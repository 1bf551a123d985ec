"""The coordinator: step loop, turns, groups, borrowed ranks, provisioner and journal.

    coordinator.py   evaluate -> rollout -> train -> sync -> record -> checkpoint, step by step
         | waits for states, which one task changes as messages arrive:
    groups.py        TrajectoryFinished | TrajectoryFailed  -> groups; the scheduler takes batches
    turns.py         TurnRequest -> scheduler -> worker; TurnProgress ... TurnFinished -> host
    worker.py, weights.py
                     the engines and their counters; the newest version and its loads
    training.py      the batch -> trainer ranks; with trainer.stream group by group
    checkpoints.py   every rank's part on disk -> committed, beside the next steps
    borrowed.py      ranks of other jobs that join, fall silent and leave
    shared_devices.py
                     which role holds a GPU that trainer and engines share
    records.py, members.py, stopping.py
                     metrics, cost and progress; the run's ranks; a stop or a failure
    provisioner.py   Slurm jobs that the scheduler, or the reward pools, request
         | every event goes to the scheduler, and every action comes back, through one queue
    rose.scheduler.actions.ActionQueue -> journal.py

coordinator.py opens with a table of its waits. It connects the modules above, which do not import
it. Outside this folder only `rose.main`, the front door and the parts import from it.
"""
