"""What a failing test leaves of its jobs is ended."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from job import Job


@pytest.fixture(autouse=True)
def none_left():
    yield
    for job in Job.started:
        if job.process.poll() is None:
            job.kill_everything()
    Job.started.clear()
