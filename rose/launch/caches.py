"""Keep the compiled kernels of GPU ranks on a disk of their node.

vLLM, Triton, Inductor and FlashInfer compile when an engine starts and keep the result under $HOME.
Under Slurm, $HOME is usually one NFS folder for all engines. Its file locks and small files make a
start minutes longer.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rose.config import Cluster
from rose.files import own_folder

# Environment variable that names a cache -> its folder below the node's.
FOLDERS = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}


def variables(cluster: Cluster, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `FOLDERS` that are not in `given`, and make the folder above their
    caches, for this user alone. It is cluster.cache_dir or else, in a Slurm job, a folder in this
    node's TMPDIR. Return {} if there is neither, or if another user owns the folder."""
    if cluster.cache_dir is not None:
        home = Path(cluster.cache_dir).expanduser()
    elif cluster.kind == "slurm":
        home = Path(tempfile.gettempdir()) / f"rose-{os.getuid()}"
    else:
        return {}
    try:
        own_folder(home, follow=cluster.cache_dir is not None)
    except OSError:
        return {}
    return {name: str(home / folder) for name, folder in FOLDERS.items() if name not in given}
