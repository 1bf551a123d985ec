"""Output of programs that the doctor starts, and a check of the finding it must make of that."""

import json
import os

import pytest

from rose.parts.doctor.finding import Ended


def ended(*events, err="", code=0):
    """A program that emitted these events, on node n unless they name another."""
    lines = "".join(json.dumps({"what": "", "node": "n"} | event) + "\n" for event in events)
    return Ended(code, f"srun: a line of somebody else\n{lines}", err)


def check(found, state, words="", remedy=""):
    assert found.state == state and words in found.words and remedy in found.remedy, found


@pytest.fixture
def nvidia_smi_says(tmp_path, monkeypatch):
    """nvidia_smi_says(script): an nvidia-smi that is this shell script; its path."""

    def make(script):
        path = tmp_path / "bin" / "nvidia-smi"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(path.parent), prepend=os.pathsep)
        return path

    return make
