"""Checks of keys against each other and against the model: a file for each part of the tree.

rose/launch/exclusions.py checks features that exclude each other, rose/launch/plan.py the machine.
"""

from __future__ import annotations

import re

import msgspec

from rose import extensions
from rose.config import recipes
from rose.config.checks import engines, machine, tasks, training
from rose.config.checks.model import check_model
from rose.config.checks.need import NO_DRAFTS, Need, drafts, needs
from rose.config.serving import Serving
from rose.config.tree import Config

__all__ = ["NAME", "NO_DRAFTS", "Need", "check", "check_model", "check_serving", "drafts", "needs"]


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,=+-]{0,150}")  # names of runs and their folders
RELAY = re.compile(r"https?://(?:\[[0-9A-Fa-f:.]+\]|[^\[\]/:\s]+):(\d{1,5})")  # group 1: the port
COLDEST = 0.01  # vLLM's _MAX_TEMP, its lowest temperature above 0; 0 means greedy


def check(c: Config) -> None:
    """Check all keys that can be checked without machine and model. Raises `ConfigError`."""
    need = needs(msgspec.to_builtins(c))
    _check_values(c, need)
    check_serving(c.serving, need)
    tasks.check(c, need)
    training.check(c, need)
    engines.check(c, need)
    machine.check(c, need)


def check_serving(s: Serving, need: Need) -> None:
    """Check the section `serving`."""
    need(
        s.lost_after_s >= 2 * s.heartbeat_s,
        "serving.lost_after_s",
        f"at least twice serving.heartbeat_s={s.heartbeat_s:g}, or a late heartbeat is a loss",
    )


def _check_values(c: Config, need: Need) -> None:
    """Check single values whose types don't bound them."""
    need(
        NAME.fullmatch(c.name) is not None,
        "name",
        "letters, digits and . _ , = + - only, at most 151 of them; it names the run's folder",
    )
    need(
        c.output_dir.strip() != "" and re.search(r"\$[A-Za-z_{]", c.output_dir) is None,
        "output_dir",
        "a folder, as outputs; a variable of the shell is written without quotes around it, or as "
        "${oc.env:HOME}/outputs",
    )
    need(
        len(c.trainer.optimizer.betas) == 2 and all(0 <= b < 1 for b in c.trainer.optimizer.betas),
        "trainer.optimizer.betas",
        "two numbers in [0, 1)",
    )
    optimizer, updates = c.trainer.optimizer, c.trainer.steps * c.trainer.updates_per_step
    need(
        optimizer.schedule == "constant" or optimizer.warmup_steps < updates,
        "trainer.optimizer.warmup_steps",
        f"below {updates}, the updates of trainer.steps={c.trainer.steps}, or the learning rate "
        f"never comes to be {optimizer.schedule}",
    )
    need(
        c.rollout.temperature >= COLDEST,
        "rollout.temperature",
        f"at least {COLDEST}: vLLM draws at no lower one, and greedy rollouts teach nothing",
    )
    relay = c.transfer.relay
    port = relay and RELAY.fullmatch(relay)
    need(
        relay is None or (port is not None and 0 < int(port[1]) < 2**16),
        "transfer.relay",
        "must be http://host:port, as `rose relay` prints it, with a port below 65536, or null",
    )
    need(
        relay is None or "relay" in extensions.names(),
        "transfer.relay",
        extensions.missing("rose.parts.relay"),
    )
    need(
        relay is None or c.transfer.relay_token_file is not None,
        "transfer.relay_token_file",
        f"transfer.relay={relay} asks for its token: the path of a file of mode 0600 with it",
    )
    need(
        c.model.source != "folder" or c.model.path is not None,
        "model.path",
        "the model's folder is needed (model.source=folder)",
    )
    if c.model.source in recipes.OPTIONS:
        recipes.check(c.model.source, c.model.recipe)
