"""`rose.api` is all that a package of others needs to import, and imports no more than is used."""

import subprocess
import sys
from pathlib import Path

import pytest

from rose import api

OUTSIDE = Path(__file__).parent / "outside" / "rose_dark"


def test_all_are_the_names_that_the_modules_have():
    assert sorted(api.__all__) == sorted(n for names in api.MODULES.values() for n in names)
    assert all(getattr(api, name) is not None for name in api.__all__)


def test_an_unknown_name_is_answered_with_those_there_are():
    with pytest.raises(ImportError):
        exec("from rose.api import Envronment")
    with pytest.raises(AttributeError, match="Envronment; it has .*Environment"):
        _ = api.Envronment


def test_an_environment_imports_no_torch():
    program = "import sys; from rose.api import Step; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_the_package_of_others_imports_only_it():
    for path in OUTSIDE.rglob("*.py"):
        for line in path.read_text().splitlines():
            if line.startswith(("import rose", "from rose")):
                assert line.startswith(("from rose.api import", "from rose_dark")), (path, line)
