"""Play the trajectories of agents' programs, with one gateway for each address."""

from __future__ import annotations

import asyncio
from typing import Any

from rose import processes
from rose.config import Config, ConfigError
from rose.parts.adapters.envs.agent import Agent
from rose.parts.adapters.gateway.program import HOST
from rose.parts.adapters.gateway.run import remove_stale, run_agent
from rose.parts.adapters.gateway.server import Gateway
from rose.parts.adapters.gateway.watchdog import Watchdog
from rose.protocol import StartTrajectory, Trajectory


class GatewayPlayer:
    """A host's gateways (`rose.agent.playing.Player`)."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._gateways: dict[str, Gateway] = {}  # address -> the gateway that listens there
        self._opening = asyncio.Lock()
        self._watchdog: Watchdog | None = None

    async def play(
        self,
        start: StartTrajectory,
        environment: Agent,
        chat: Any,
        request_turn: Any,
        limits: Any,
        key: str,
        *rest: Any,
    ) -> Trajectory:
        """Run the agent's program for one trajectory."""
        gateway = await self._gateway(environment.listen, key)
        return await run_agent(start, environment, gateway, chat, request_turn, limits, key, *rest)

    async def _gateway(self, address: str, key: str) -> Gateway:
        """Return the gateway at `address`; the first call opens it. Raises `ConfigError`."""
        async with self._opening:
            if address not in self._gateways:
                gateway = Gateway(self._config.model.name)
                try:
                    await gateway.open(address)
                except OSError as error:
                    raise ConfigError(
                        f"{key}.args.listen={address!r}: the gateway can't listen there: {error}"
                    ) from None
                await asyncio.to_thread(remove_stale)
                self._gateways[address] = gateway
                self._watchdog = self._watchdog or Watchdog(HOST)
                processes.adopt_orphans()  # such as processes that agents leave behind
            return self._gateways[address]

    async def close(self) -> None:
        for gateway in self._gateways.values():
            await gateway.close()
        if self._watchdog is not None:
            await asyncio.to_thread(self._watchdog.close)
