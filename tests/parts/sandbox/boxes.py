"""Helpers of the programs scenarios.py, captures.py and effects.py. They use the standard library
only: another user may have no other Python than the system's."""

import os

from rose.parts.sandbox import Limits, Mount, Sandbox, SandboxError, Spec, probe

SMALL = Limits(memory_mib=256, disk_mib=8, processes=40)
LONG_S = 300.0  # a deadline that no test waits for


def of_image(image, files, **more):
    """The Spec of a sandbox with a root of its own, a new folder `image` with these files (path ->
    text), over the host's /usr."""
    os.makedirs(f"{image}/etc")
    os.chmod(image, 0o755)
    for name in ("bin", "sbin", "lib", "lib64"):
        os.symlink(f"usr/{name}", f"{image}/{name}")
    for path, text in files.items():
        os.makedirs(os.path.dirname(f"{image}/{path}"), exist_ok=True)
        with open(f"{image}/{path}", "w") as file:
            file.write(text)
    return Spec(image=str(image), mounts=(Mount("/usr", "/usr"),), **more)


async def refused(attempt, words, kind=SandboxError):
    """`attempt` must raise an error of this kind with these words."""
    try:
        await attempt
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"{attempt} was not refused: {words}")


async def start(limits=SMALL):
    return await Sandbox.start(Spec(limits=limits), "namespaces")


async def play(scenarios, names, place):
    """Give each scenario (of these names, if there are any) what `place()` opens."""
    for scenario in scenarios:
        if not names or scenario.__name__ in names:
            async with place() as given:
                await scenario(*given)
            print("passed", scenario.__name__, flush=True)
    end()


def end():
    """Print which rights this user's sandboxes have, and end what all of them share."""
    print("root" if probe.keeper().root else "rootless")
    probe.close()
