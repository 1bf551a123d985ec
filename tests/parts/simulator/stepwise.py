"""An engine that takes every step, which the simulated engines skip over."""

import math

from rose.parts.simulator.spec import StepTime


def first_and_last(
    requests, step: StepTime, sequences: int, batched: int, kv=math.inf, at_once=0.0
):
    """(time of the first token, of the last) of each request (time, context, tokens), in order of
    arrival, with room for so many sequences, tokens a step and tokens of KV cache. What arrives
    within `at_once` seconds arrives at once."""
    now, after, running, prefill = 0.0, 0, [], []
    first, last, held = {}, {}, 0

    def need(request: int) -> int:
        return sum(requests[request][1:])

    def fits(request: int) -> bool:
        return len(running) + len(prefill) < sequences and held + need(request) <= kv

    while after < len(requests) or running or prefill:
        if not running and not prefill:
            now = max(now, requests[after][0])
        while after < len(requests) and requests[after][0] <= now + at_once and fits(after):
            prefill.append([after, 0])
            held, after = held + need(after), after + 1
        room, cost, joined = max(1, batched - len(running)), 0.0, []
        for chunk in prefill:
            whole = requests[chunk[0]][1]
            new = min(whole - chunk[1], room)
            cost += new * (step.c1 + step.c2 * (chunk[1] + new / 2))
            chunk[1], room = chunk[1] + new, room - new
            joined += [chunk] if chunk[1] == whole else []
            if not room:
                break
        attended = sum(context for _, context in running)
        now += step.c5 + max(step.c0, cost) + step.c3 * len(running) + step.c4 * attended
        running = [(request, context + 1) for request, context in running]
        for chunk in joined:
            prefill.remove(chunk)
            first[chunk[0]] = now
            running.append((chunk[0], chunk[1] + 1))
        for request, context in list(running):
            if context == need(request):
                running.remove((request, context))
                last[request] = now
                held -= context
    return [(first[i], last[i]) for i in range(len(requests))]
