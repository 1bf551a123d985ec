"""An environment on openenv-core's own server, on the port given: higher or lower."""

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    """Guess the number from 1 to 20."""

    number: int


class Hint(Observation):
    text: str


class HigherLower(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, most=20, **_):
        self._number = random.Random(seed).randint(1, most)
        self._state = State(episode_id=episode_id, step_count=0)
        return Hint(text=f"A number from 1 to {most}.")

    def step(self, action, timeout_s=None, **_):
        self._state.step_count += 1
        if action.number == 666:
            raise RuntimeError("broken")
        right = action.number == self._number
        text = "right" if right else "higher" if action.number < self._number else "lower"
        return Hint(text=text, done=right, reward=1.0 if right else 0.0)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(HigherLower, Guess, Hint, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
