"""The state of a bash session as a script that makes it again in another one: working directory,
umask, arguments, functions, variables, aliases, options and traps. It can't bring back background
processes, jobs, open files or what bash counts (`$!`, `SECONDS`, history).
"""

from __future__ import annotations

import re

LOST = "variables and functions were brought back, but not jobs, open files and processes: "
NOTHING = b"\1".join(  # the account of a session whose state doesn't matter
    f"{name}\n".encode()
    for name in (
        "",
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
)
FIXED = re.compile(  # bash sets these, or refuses them
    r"declare -\S+ (BASH(?!_ENV|_XTRACEFD|_COMPAT)\w*|COMP_WORDBREAKS|DIRSTACK|EPOCH\w+|EUID"
    r"|FUNCNAME|GROUPS|HISTCMD|LINENO|PIPESTATUS|PPID|S?RANDOM|SECONDS|SHELLOPTS|UID|_|__rose)(=|$)"
)
RECORD = re.compile(r"^(?=declare -)", re.MULTILINE)


def script(said: bytes) -> str:
    """Of a session's account of itself (`backend.SESSION`). Raises ValueError."""
    text = said.decode(errors="surrogateescape")
    parts = dict(part.partition("\n")[::2] for part in text.split("\1")[1:])
    if "end" not in parts:
        raise ValueError(f"a session did not tell all of its state: {text[-200:]!r}")
    count, _, arguments = parts["arguments"].partition(" ")
    arguments = "" if count == "0" else f"set -- {arguments}\n"
    kept = "".join(r for r in RECORD.split(parts["variables"]) if not FIXED.match(r))
    disabled = "".join(f"{x}\n" for x in parts["builtins"].split("\n") if x[:9] == "enable -n")
    made = (parts["folder and umask"], arguments, parts["functions"], kept, parts["aliases"])
    # the folder first, as cd sets OLDPWD; options such as errexit and nounset count from then on
    made += (parts["traps"], disabled, parts["options"])
    return f"{{\n{''.join(made)}}} >/dev/null 2>&1\n"
