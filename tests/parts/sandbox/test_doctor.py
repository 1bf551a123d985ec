"""The doctor's findings about this machine's sandboxes."""

from rose.parts.sandbox import Found
from rose.parts.sandbox.doctor import of_backends


def test_each_backend_of_sandboxes_is_named_with_what_is_lost():
    whole = Found("namespaces", "with root")
    absent = Found("gvisor", "", "runsc is not installed")
    first, second = of_backends([whole, absent])
    assert (first.state, first.words) == ("ok", "with root (backend=auto takes it)")
    assert (second.state, second.words) == ("ok", "not used: runsc is not installed")
    refused = Found("namespaces", "", "user.max_user_namespaces=0 is in the way")
    first, second = of_backends([refused, Found("gvisor", "works", "", ("no pids",))])
    assert first.state == "warning" and refused.problem in first.words
    assert second.state == "warning" and second.remedy == "no pids"
    assert second.words == "works (backend=auto takes it)"
    first, second = of_backends([refused, absent])
    assert first.remedy == second.remedy == "env=terminal can't run here"
