"""MPICH's shared memory, by the names that a process maps."""

import mmap
import os
import secrets
from pathlib import Path

import pytest

from rose.comm import mpi_process

MEMORY = Path("/dev/shm")


@pytest.fixture
def make():
    """Make a file in /dev/shm, which this process maps or not."""
    made, maps = [], []

    def file(name, mapped=True, folder=MEMORY):
        path = os.path.join(os.fsencode(folder), os.fsencode(name))
        with open(path, "xb+") as file:
            made.append(path)
            file.truncate(4096)
            if mapped:
                maps.append(mmap.mmap(file.fileno(), 4096))
        return Path(os.fsdecode(path))

    yield file
    for each in maps:
        each.close()
    for path in made:
        if os.path.exists(path):
            os.unlink(path)


def test_the_memory_of_a_whole_world_goes_and_that_of_others_stays(make):
    world = secrets.token_hex(4)
    gone = [make(f"mpich_shm_{world}_0"), make(f"mpich_shm_{world}_1", mapped=False)]
    other = make(f"mpich_shm_{world}0_0", mapped=False)
    mpi_process.remove_shared(os.getpid())
    assert [path.exists() for path in (*gone, other)] == [False, False, True]


def test_a_name_that_says_no_world_stands_for_itself_alone(make):
    """MPICH 4 and before have mpich_shar_tmp and six letters, of whatever world; and an agent may
    map files of any name."""
    mine = [make(f"mpich_shar_{secrets.token_hex(4)}"), make(f"mpich_shm_*_{secrets.randbits(32)}")]
    other = [make(f"mpich_shar_{secrets.token_hex(4)}", mapped=False)]
    other.append(make(f"mpich_shm_{secrets.token_hex(4)}_0", mapped=False))
    mpi_process.remove_shared(os.getpid())
    assert not any(path.exists() for path in mine) and all(path.exists() for path in other)


def test_a_process_may_map_files_whose_names_are_no_text(make, tmp_path):
    make(b"\xff\xfe", folder=tmp_path)
    mine = make(f"mpich_shm_{secrets.token_hex(4)}_0")
    assert mpi_process.shared("self") == [str(mine)]
