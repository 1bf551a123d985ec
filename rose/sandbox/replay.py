"""The state of a bash session as a script that makes it again in another one: working directory,
umask, arguments, functions, variables, aliases, options and traps. It can't bring back background
processes, jobs, open files or what bash counts (`$!`, `SECONDS`, history).
"""

from __future__ import annotations

import re

STATE_BYTES = 8 << 20
# Only builtins: no file is written, no process is left, and `$!` stays. Parts end with NUL.
ASK = r"""{
builtin printf 'builtin cd -- %q\n' "$PWD"; builtin umask -p
if [[ $# -gt 0 ]]; then builtin printf 'set --'; builtin printf ' %q' "$@"; builtin printf '\n'; fi
builtin printf '\0'; builtin declare -f; builtin declare -F
builtin printf '\0'; builtin declare -p
builtin printf '\0'; builtin alias -p; builtin trap -p
builtin shopt -p || builtin :; builtin set +o
builtin printf '\0'
} 2>/dev/null"""
FIXED = re.compile(  # bash sets these, or refuses them
    r"declare -\S+ (BASH(?!_ENV|_XTRACEFD|_COMPAT)\w*|COMP_WORDBREAKS|DIRSTACK|EPOCH\w+|EUID"
    r"|FUNCNAME|GROUPS|HISTCMD|LINENO|PIPESTATUS|PPID|S?RANDOM|SECONDS|SHELLOPTS|UID|_|__rose)(=|$)"
)
RECORD = re.compile(r"^(?=declare -)", re.MULTILINE)


def script(said: str) -> str:
    """Of what a session answers to `ASK`. Raises ValueError."""
    parts = said.split("\0")
    if len(parts) != 5 or parts[4]:
        raise ValueError(f"a session's state has four parts, not these: {said[-200:]!r}")
    place, functions, variables, rest = parts[:4]
    kept = "".join(r for r in RECORD.split(variables) if not FIXED.match(r))
    # `rest` last: options such as errexit and nounset count from then on
    return f"{{\n{place}{functions}{kept}{rest}}} >/dev/null 2>&1\n"
