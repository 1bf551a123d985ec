"""What a failing test leaves of its jobs is ended."""

import pytest

from tests.job.job import Job


@pytest.fixture(autouse=True)
def none_left():
    yield
    for job in Job.started:
        if job.process.poll() is None:
            job.kill_everything()
    Job.started.clear()
