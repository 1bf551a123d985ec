"""Build .kit/ and .kit-moe/: what a bare GPU machine lacks to run ROSE on a Hopper GPU.

    .venv/bin/python scripts/gpu_kit/build_kit.py      # in the checkout; 3 minutes, 1 GB of /tmp

The machine has Python 3.12, torch 2.11 for CUDA 13, Triton, transformers, and no network. vLLM's
extensions use torch's stable ABI alone (nm shows no symbol that torch 2.11 lacks), so torch itself
need not travel. The kit has the packages of packages.txt in the versions of requirements/gpu.txt.

It is made small in three ways. Fat binaries keep their sm_90 code only: their other entries are
removed and zeros, which xz compresses away, fill their places, so that all files keep their lengths
and offsets. FlashAttention 2 (Hopper uses 3), DeepGEMM, FlashMLA and vLLM's Rust front end are left
out. Of FlashAttention 3 the bfloat16 kernels for heads of 64 and 128 stay.

.kit-moe/ has what mixtures of experts need besides.
"""

import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

LOCK = Path("requirements/gpu.txt")
WANTED = (Path(__file__).parent / "packages.txt").read_text(encoding="utf-8").split()
GLIBC = ("_2_35", "_2_34", "_2_31", "_2_28", "_2_27", "_2_17", "2014", "1")
TAGS = ["--python-version=3.12", "--implementation=cp", "--only-binary=:all:", "--no-deps"]
TAGS += [f"--platform=manylinux{version}_x86_64" for version in GLIBC]
SOURCE = ("deepspeed", "antlr4-python3-runtime")  # wheels are made here: pure Python
EXTENSIONS = ("deepselect_C", "flashkda_C", "flashmla_C", "flashmla_extension_C", "qutlass_C")
DROPPED = ["vllm/vllm-rs", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"]
DROPPED += [f"vllm/third_party/{name}" for name in ("deep_gemm", "fmha_sm100", "tml_fa4")]
DROPPED += [f"vllm/_{name}.abi3.so" for name in EXTENSIONS]
INFO = {
    "METADATA": "Metadata-Version: 2.1\nName: rose\nVersion: 0.1.0\n",
    "entry_points.txt": "[vllm.general_plugins]\nrose = rose.engine.plugin:register\n",
}
PRUNED = [
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
]


def containers(data):
    """Yield each fat binary of an ELF file: where it begins, where its header ends, its end, and
    its entries as (kind, architecture, begin, payload, end). Kind 1 is PTX, 2 is machine code."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    heads = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    for head in heads:
        at = heads[names][4] + head[0]
        if data[at : at + 11] != b".nv_fatbin\0":
            continue
        at, end = head[4], head[4] + head[5]
        while at + 16 <= end:
            magic, _, header, body = struct.unpack_from("<IHHQ", data, at)
            if magic != 0xBA55ED50:
                at += 8
                continue
            part, stop, found = at + header, at + header + body, []
            while part < stop:
                kind, _, own, length = struct.unpack_from("<HHIQ", data, part)
                (architecture,) = struct.unpack_from("<I", data, part + 0x1C)
                payload, after = part + own, part + own + length
                found.append((kind, architecture, part, payload, after))
                part = after
            yield at, at + header, stop, found
            at = stop


def prune(path):
    """Rewrite each fat binary of the file `path` with fewer entries.

    Kept is the code for sm_90 or, where there is none, the newest PTX that sm_90 can run. A binary
    begins where it did; zeros fill the rest of its place.
    """
    data = bytearray(path.read_bytes())
    whole = bytes(data)
    for begin, body, end, found in containers(whole):
        code = [e for e in found if e[0] == 2 and e[1] == 90]
        kept = code or sorted(e for e in found if e[0] == 1 and e[1] <= 90)[-1:]
        entries = b"".join(whole[e[2] : e[4]] for e in kept if used(whole[e[3] : e[4]]))
        struct.pack_into("<Q", data, begin + 8, len(entries))
        data[body:end] = entries + bytes(end - body - len(entries))
    path.write_bytes(data)


def used(code):
    """True unless `code` is a FlashAttention 3 kernel that no model of the checks uses."""
    if b"CollectiveMainloopFwdSm90" not in code:
        return True
    found = re.search(rb"ELi(\d+)ENS_10bfloat16_tEfNS_4arch4Sm90", code)
    others = b"6half_t" in code or b"float_e4m3_t" in code
    return found is not None and int(found[1]) in (64, 128) and not others


def main():
    text = LOCK.read_text(encoding="utf-8")
    pins = [line.strip() for line in text.splitlines() if "==" in line and line[0] != "#"]
    lock = {pin.partition("==")[0]: pin for pin in pins}
    site = Path(tempfile.mkdtemp(prefix="kit-")) / "site"
    made = site.parent / "made"
    pip("wheel", "--no-deps", "-w", made, *(lock[name] for name in SOURCE))
    binary = [lock[name] for name in WANTED if name not in SOURCE]
    pip("install", "--no-compile", *TAGS, "--target", site, *binary, *made.glob("*.whl"))
    pip("download", *TAGS, "-d", made, lock["mpich"])
    with_data(next(made.glob("mpich-*.whl")), site)
    for name in DROPPED:
        path = site / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in PRUNED:
        if (site / name).exists():
            prune(site / name)
    kept = [site / name for name in PRUNED]
    for path in [path for path in site.rglob("*") if path.is_file()]:
        if path.suffix in (".a", ".pyi", ".cu", ".h", ".cuh", ".hpp"):
            path.unlink()
        elif ".so" in path.name and not path.is_symlink() and path not in kept:
            subprocess.run(["strip", "--strip-unneeded", path], stderr=subprocess.DEVNULL)
    info = site / "rose-0.1.0.dist-info"
    info.mkdir()
    for name, text in INFO.items():
        (info / name).write_text(text, encoding="utf-8")
    experts = site.parent / "moe" / PRUNED[1]
    experts.parent.mkdir(parents=True)
    shutil.move(site / PRUNED[1], experts)
    parts = {".kit": site, ".kit-moe": site.parent / "moe"}
    sizes = {name: packed(source, Path(name)) / 2**20 for name, source in parts.items()}
    shutil.rmtree(site.parent)
    exclude = Path(git("rev-parse", "--git-path", "info/exclude").strip())
    known = exclude.read_text(encoding="utf-8") if exclude.exists() else ""
    if "/.kit*/" not in known.split():
        exclude.parent.mkdir(exist_ok=True)
        exclude.write_text(known + "\n/.kit*/\n", encoding="utf-8")
    tree = sum(Path(f).stat().st_size for f in git("ls-files", "-z").split("\0") if f) / 2**20
    said = ", ".join(f"{name} {size:.1f} MiB" for name, size in sizes.items())
    print(f"{said}, the checkout {tree:.1f} MiB; together they should stay below 64")


def pip(word, *arguments):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", word, "-q", *arguments]
    subprocess.run(command, check=True)


def with_data(wheel, site):
    """Unpack MPICH's programs and libraries into `site`.

    They are the wheel's data, of which `pip install --target` leaves out the folder `lib`.
    """
    with zipfile.ZipFile(wheel) as whole:
        for member in whole.infolist():
            _, found, name = member.filename.partition(".data/data/")
            if found and not member.is_dir() and name.split("/")[0] in ("bin", "lib"):
                path = site / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(whole.read(member))
                path.chmod(0o755)


def packed(source, folder):
    """Pack `source` into `folder`/kit.tar.xz and return the archive's size in bytes."""
    folder.mkdir(exist_ok=True)
    with tarfile.open(folder / "kit.tar.xz", "w:xz", preset=6) as tar:
        tar.add(source, ".")
    return (folder / "kit.tar.xz").stat().st_size


def git(*words):
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
