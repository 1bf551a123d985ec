"""The payloads that a trainer rank publishes of its optimizer's updates are, byte for byte, those
that it publishes by comparing with a copy of the last version."""

import pytest

from rose.transfer.edge import Edge, list_edges, read_plan
from rose.transfer.source import Folder
from tests.trainer import tiny_world
from tests.trainer.test_experts import tiny_mixture

ACTIONS = [
    ["publish", 0],
    ["train", 1, 4000, 1, 1, 1],
    ["publish", 1],
    ["train", 2, 40, 2, 1, 2],  # two updates
    ["publish", 2],
    ["publish", 3, "away"],  # nothing changed; a full version is due
    ["train", 3, 100, 1, 1],
    ["train", 4, 100, 1, 1],  # two steps for one version
    ["publish", 4],
    ["save"],
    ["train", 6, 64, 1, 1],
    ["load"],  # over what was trained and not published
    ["train", 7, 64, 1, 1],
    ["publish", 5],
]
RESUMED = [["load"], ["publish", 4], ["train", 5, 64, 1, 1, 5], ["publish", 5]]


def contents(store):
    """Each edge's entries and payloads, by block."""
    source, found = Folder(store), {}
    plan, digest = read_plan(source)
    for step in list_edges(source):
        edge = Edge(source, *step, plan, digest)
        for rank in range(plan.world):
            for number, (entry, payload) in edge.payloads(rank, plan.owned(rank)).items():
                found[step, number] = entry, bytes(payload)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "ranks", "mixture", "more"),
    [
        *((2, 3, False, []), (2, 2, True, []), (3, 2, True, [])),
        (3, 3, False, ["trainer.optimizer.lr=1e-4"]),
    ],
)
def test_versions_are_those_of_a_copy(tmp_path, stage, ranks, mixture, more):
    if mixture:
        tiny_mixture().save_pretrained(tmp_path / "model")
    else:
        tiny_world.save_model(tmp_path / "model")
    settings = [f"trainer.zero_stage={stage}", *tiny_world.BFLOAT16, *more]
    settings += ["transfer.full_every=3", "transfer.keep_versions=100"]
    for name, actions in (("run", ACTIONS), ("resumed", RESUMED)):
        job = {"name": name, "settings": settings, "actions": actions}
        job |= {"beside": True, "degrees": [1, 2, 4]}
        reports = tiny_world.run_world(job, tmp_path, ranks)
        assert all(report["compares"] for report in reports)
        ours, copied = contents(tmp_path / name), contents(tmp_path / "copied")
        assert ours.keys() == copied.keys()
        assert ours == copied
        # deltas, planes and, in the first run, unchanged blocks
        assert {*(payload[2] for _, payload in ours.values())} >= {1, 2, *([0] * (name == "run"))}
