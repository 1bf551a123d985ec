"""An environment host: owns trajectories, asks for one turn at a time."""

from __future__ import annotations

from rose import protocol as p
from rose.agent.chat import ChatFormat
from rose.agent.generate import TrajectoryHost
from rose.comm.mailbox import COORDINATOR, Mailbox
from rose.comm.tasks import Tasks
from rose.config import Config
from rose.models import resolve
from rose.observe.recorder import NullRecorder


async def run(config: Config, mailbox: Mailbox, recorder: NullRecorder) -> None:
    """Until the coordinator says `Shutdown`."""
    chat = ChatFormat(resolve(config.model), config.model.chat_template_args)
    tasks = Tasks()
    host = TrajectoryHost(
        config, chat, lambda message: mailbox.send(COORDINATOR, message), tasks.spawn, recorder
    )

    async def receive() -> None:
        while not isinstance(message := (await mailbox.receive())[1], p.Shutdown):
            host.handle(message)

    try:
        await tasks.run_until(receive())
    finally:
        # cancelled trajectories close their environments
        await tasks.close(config.env.step_timeout_s)
