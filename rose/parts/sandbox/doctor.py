"""The findings of `rose doctor` about this machine's sandboxes (`rose.extensions` loads this)."""

from __future__ import annotations

from rose.parts import sandbox
from rose.parts.doctor.finding import Finding


def findings() -> list[Finding]:
    """Start a sandbox with each backend of env=terminal, and report which backends work. If none
    does, that is only a warning, because other environments need no sandboxes."""
    return of_backends(sandbox.describe())


def of_backends(found: list[sandbox.Found]) -> list[Finding]:
    """Return a finding for each backend. `found` has the preferred backend first."""
    works = [each for each in found if not each.problem]
    findings = []
    for each in found:
        part = f"sandboxes, {each.backend}"
        if each.problem and not works:
            findings.append(Finding("warning", part, each.problem, "env=terminal can't run here"))
        elif each.problem:
            # Only a problem of the preferred backend is a warning.
            state = "warning" if each is found[0] else "ok"
            findings.append(Finding(state, part, f"not used: {each.problem}"))
        else:
            state = "warning" if each.lacking else "ok"
            first = " (backend=auto takes it)" if each is works[0] else ""
            findings.append(Finding(state, part, each.words + first, "; ".join(each.lacking)))
    return findings
