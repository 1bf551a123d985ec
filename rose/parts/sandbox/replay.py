"""Turn the state of a bash session into a script that restores it in another one: the working
directory, umask, arguments, functions, variables, aliases, options and traps. The script can't
restore background processes, jobs, open files, `$!`, `SECONDS` or the history.
"""

from __future__ import annotations

import re
import shlex

SAY = "builtin printf '\\1%s\\n' '{}'"
LOST = "variables and functions were brought back, but not jobs, open files and processes: "
NAMES = (
    "arguments",
    "variables",
    "builtins",
    "folder and umask",
    "functions",
    "aliases",
    "traps",
    "options",
    "end",
)
# Answer to `backend.ACCOUNT` of a session whose state doesn't matter
NOTHING = "".join(f"\1{name}\n" for name in NAMES).encode()
# Start of a part. It must have one of these names, because a function may also contain the byte 1.
PART = re.compile(rf"\x01({'|'.join((*NAMES, 'jobs', 'limits', 'folders', 'history'))})(?:\n|\Z)")
FIXED = re.compile(  # variables that bash sets itself, or refuses to set
    r"declare -\S+ (BASH(?!_ENV|_XTRACEFD|_COMPAT)\w*|COMP_WORDBREAKS|DIRSTACK|EPOCH\w+|EUID"
    r"|FUNCNAME|GROUPS|HISTCMD|LINENO|PIPESTATUS|PPID|S?RANDOM|SECONDS|SHELLOPTS|UID|_|__rose)(=|$)"
)
RECORD = re.compile(r"^(?=declare -)", re.MULTILINE)


def script(said: bytes) -> str:
    """Return the script for a session's answer to `ACCOUNT` (`backend.SESSION`). The script
    evaluates each part separately, so that an unreadable part doesn't affect the others. It prints
    the names of the parts that failed, then "end" (see `lost`). Raises ValueError."""
    text = said.decode(errors="surrogateescape")
    found = PART.split(text)[1:]
    parts = dict(zip(found[::2], found[1::2], strict=True))
    if "end" not in parts:
        raise ValueError(f"a session did not print its whole state: {text[-200:]!r}")
    count, _, arguments = parts["arguments"].partition(" ")
    disabled = "".join(f"{x}\n" for x in parts["builtins"].split("\n") if x[:9] == "enable -n")
    folder, _, umask = parts["folder and umask"].partition("\n")
    # The folder is first, because cd sets OLDPWD. Options are last, because they apply at once.
    made = {
        "working directory": f"{folder or ':'} &&",
        "umask": umask,
        "arguments": "" if count == "0" else f"set -- {arguments}",
        "functions": parts["functions"],
        "variables": "".join(r for r in RECORD.split(parts["variables"]) if not FIXED.match(r)),
        "aliases": parts["aliases"],
        "options and traps": parts["options"] + parts["traps"] + disabled,
    }
    # Functions may contain patterns that bash reads only with extglob. "options" restores extglob.
    lines = ["builtin shopt -s extglob"]
    for name, text in made.items():
        # bash reads a group as a whole, so aliases that the group defines don't apply in it.
        whole = shlex.quote(f"{{\n{text}\nbuiltin :\n}}")
        lines.append(f"builtin eval {whole} >/dev/null 2>&1 || {SAY.format(name)}")
    return "\n".join(["{", *lines, SAY.format("end"), "}\n"])


def lost(printed: bytes) -> list[str]:
    """Return the parts that the script could not restore. `printed`: the script's output."""
    found = re.findall(r"\x01([a-z ]+)\n", printed.decode(errors="replace"))
    return found[:-1] if found[-1:] == ["end"] else [*found, "what comes after that"]
