"""The coordinator: step loop, turns, groups, borrowed ranks, provisioner and journal.

    coordinator.py   evaluate -> rollout -> train -> sync -> record -> checkpoint, step by step
         | waits for states, which one task changes as messages arrive:
    groups.py        TrajectoryFinished | TrajectoryFailed  -> groups; the scheduler takes batches
    turns.py         TurnRequest -> scheduler -> worker; TurnProgress ... TurnFinished -> host
    training.py      the batch -> trainer ranks; with trainer.stream group by group
    checkpoints.py   every rank's part on disk -> committed, beside the next steps
    borrowed.py      ranks of other jobs that join, fall silent and leave
    shared_devices.py, hybrid_devices.py
                     which role holds a GPU that trainer and engines share
    provisioner.py, reward_jobs.py
                     Slurm jobs that the scheduler, or the reward pools, request
         | every event goes to the scheduler, and every action comes back, through one queue
    rose.scheduler.actions.ActionQueue -> journal.py

The step loop waits for: the batch (groups.py unblocks it), trainer ranks (TrainDone), engines
(VersionLoaded), a checkpoint on disk. The coordinator is one rank without a GPU. coordinator.py
connects the modules above, which do not import it. Outside this folder only `rose.main`, the front
door, the doctor and rose.play import from it.
"""
