"""Raw captures as a sandbox's `capture` makes them, of real files and pages of memory."""

import json
import os
import random
import stat
import sys
from pathlib import Path

PAGES = Path(sys.executable).resolve().read_bytes()[: 1 << 20]
SOURCES = sorted(Path(os.__file__).parent.glob("*.py"))


class Upper:
    """A changing folder, and captures of it by the contract."""

    def __init__(self, folder, seed):
        self.folder, self.random = folder, random.Random(seed)
        folder.mkdir(parents=True)
        self.seen = {}
        self.image = bytearray(PAGES[: self.random.randrange(1, 200) * 4096])

    def change(self):
        """Some of: a new file, one that grows, one rewritten, one removed, a link, a full folder, a
        hole, pages."""
        pick, files = self.random, sorted(p for p in self.folder.rglob("*") if p.is_file())
        for _ in range(pick.randrange(1, 5)):
            new = self.folder / f"d{pick.randrange(3)}" / f"f{pick.randrange(10**6)} ü\n"
            new.parent.mkdir(exist_ok=True)
            kind = pick.randrange(6)
            if kind == 0 or not files:
                new.write_bytes(pick.choice(SOURCES).read_bytes())
            elif kind == 1:
                with pick.choice(files).open("ab") as file:
                    file.write(pick.randbytes(pick.randrange(100_000)))
            elif kind == 2:
                pick.choice(files).write_bytes(pick.choice((b"", b"x", bytes(70_000))))
            elif kind == 3:
                pick.choice(files).unlink(missing_ok=True)
            elif kind == 4:
                new.symlink_to("/nowhere")
            else:
                with new.open("wb") as file:
                    file.truncate(300_000)
                    file.write(b"begin")
            files = [p for p in files if p.exists()]
        for _ in range(pick.randrange(3)):
            at = pick.randrange(len(self.image) // 4096) * 4096
            self.image[at : at + 4096] = pick.randbytes(4096)

    def capture(self, into, process):
        """The folder `into`, and what restoring it must give: path -> bytes, in it and in the
        sandbox."""
        (into / "data").mkdir(parents=True)
        seen, entries, contents = {}, [], {}
        for number, path in enumerate(sorted(self.folder.rglob("*"))):
            found = path.lstat()
            name, mode = str(path.relative_to(self.folder)), stat.S_IMODE(found.st_mode)
            entry = {"path": name, "mode": mode}
            entry |= {"uid": found.st_uid, "gid": found.st_gid, "mtime_ns": found.st_mtime_ns}
            entry |= {"size": found.st_size, "xattrs": {}, "target": None, "data": None}
            if path.is_symlink():
                entry |= {"kind": "link", "target": os.readlink(path)}
            elif path.is_dir():
                entry["kind"] = "dir"
            else:
                entry["kind"] = "file"
                contents[name] = data = path.read_bytes()
                seen[name] = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
                if self.seen.get(name) != seen[name]:
                    entry["data"] = f"data/{number}"
                    (into / entry["data"]).write_bytes(data)
            entries.append(entry)
        self.seen = seen
        about = json.dumps({"kind": "process" if process else "files"})
        files = {"shell": f"cd {into}\n".encode(), "about.json": about.encode()}
        if process:
            (into / "image" / "empty").mkdir(parents=True)
            files |= {"image/pages-1.img": bytes(self.image), "image/core-1.img": b"core" * 100}
        for where, data in files.items():
            (into / where).write_bytes(data)
        (into / "listing.json").write_text(json.dumps(entries))
        return entries, contents, files


def sparse(folder, size, data):
    """A raw capture of one file of `size` bytes, all holes but for `data`: {offset: bytes}."""
    (folder / "data").mkdir(parents=True)
    with (folder / "data" / "0").open("wb") as file:
        for at, content in data.items():
            file.seek(at)
            file.write(content)
        file.truncate(size)
    entry = {"path": "f", "kind": "file", "data": "data/0"}
    (folder / "listing.json").write_text(json.dumps([entry]))
    return folder


def check_loaded(folder, made):
    """`folder` is the whole capture that `Upper.capture` told of."""
    entries, contents, files = made
    loaded = json.loads((folder / "listing.json").read_text())
    strip = [{k: v for k, v in entry.items() if k != "data"} for entry in loaded]
    assert strip == [{k: v for k, v in entry.items() if k != "data"} for entry in entries]
    found = {e["path"]: (folder / e["data"]).read_bytes() for e in loaded if e["kind"] == "file"}
    assert found == contents
    named = {"listing.json", *files, *(e["data"] for e in loaded if e["data"])}
    there = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert there == named
    for where, data in files.items():
        assert (folder / where).read_bytes() == data, where
