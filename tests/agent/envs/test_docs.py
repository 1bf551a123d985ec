"""Check what docs/environments.md says, and that tests/outside installs its package."""

import re
from pathlib import Path

import printed

from rose.agent import envs

REPOSITORY = Path(__file__).resolve().parents[3]


def test_the_example_is_the_package_that_the_tests_install():
    """Whose pyproject.toml has an algorithm and a policy besides."""
    files = printed.files("environments.md").items()
    shown = {path: content for path, content in files if path.startswith("rose_dark/")}
    assert len(shown) == 3
    for path, content in shown.items():
        assert (REPOSITORY / "tests" / "outside" / path).read_text().startswith(content)


def test_the_table_lists_every_environment():
    text = (REPOSITORY / "docs" / "environments.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.M)) == set(envs.names())
