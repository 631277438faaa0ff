"""Prints `launch.py status`: an engine's state, what it holds, how fast it goes. Called by `frontend.terminal`."""

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence

from common.client_messages import StatusReply
from common.errors import TriremeError
from common.messages import STEP_PARTS
from common.run_dir import Instance
from frontend.client import Client

ANSWER_TIMEOUT_S = 3.0
INTERVAL_S = 1.0
"""Between two looks: speeds are differences."""


def show(running: Sequence[Instance], *, watch: bool = False, as_json: bool = False) -> int:
    """Print how these engines are; returns 1 if one does not answer.

    Args:
        running: the engines.
        watch: again every second until Ctrl-C, in place on a terminal.
        as_json: one JSON object a line for each engine, for programs.
    """
    views = [View(instance) for instance in running]
    try:
        while True:
            texts = [view.as_json() if as_json else view.text() for view in views]
            print("\n".join(texts), flush=True)
            if not watch:
                return max(view.exit_code for view in views)
            time.sleep(INTERVAL_S)
            if sys.stdout.isatty() and not as_json:
                width = shutil.get_terminal_size().columns
                print(f"\033[{line_count(texts, width)}A\033[J", end="")
    except KeyboardInterrupt:
        return 0
    finally:
        for view in views:
            view.close()


def line_count(texts: Sequence[str], width: int) -> int:
    """How many lines of a terminal these texts fill: what is wider than it is broken."""
    return sum(max(1, -(-len(line) // width)) for text in texts for line in text.split("\n"))


class View:
    """One engine, looked at once or again and again.

    Args:
        instance: the engine.

    Attributes:
        exit_code: 1 once it has not answered.
    """

    def __init__(self, instance: Instance) -> None:
        self.exit_code = 0
        self._instance = instance
        self._client: Client | None = None
        self._last: tuple[float, StatusReply] | None = None

    def close(self) -> None:
        """Leave the engine alone."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def text(self) -> str:
        """How it is, for people."""
        ready = self._instance.ready
        if not ready:
            return f"pid {self._instance.pid}: starting"
        lines = [f"pid {self._instance.pid}: {ready['model']}, up {duration(time.time() - ready['ready_at_s'])}"]
        where = f"{ready['http']}/v1   (live: {ready['http']}/dashboard)" if ready["http"] else "off"
        lines += [f"  HTTP      {where}", f"  client    {ready['client_endpoint']}"]
        try:
            replies = self._ask()
        except (TriremeError, TimeoutError) as error:
            self.exit_code = 1
            self.close()
            return "\n".join([*lines, f"  state     does not answer: {error}"])
        return "\n".join([*lines, *describe(*replies)])

    def as_json(self) -> str:
        """How it is, for programs."""
        ready = self._instance.ready
        found = {"pid": self._instance.pid, "state": "starting", **ready}
        try:
            if ready:
                reply = self._ask(speeds=False)[1]
                found |= {"state": reply.state, "detail": reply.detail, "live_count": reply.live_count}
                found |= {"limits": reply.limits, "figures": reply.figures}
        except (TriremeError, TimeoutError) as error:
            self.exit_code = 1
            found |= {"state": "silent", "detail": str(error)}
        return json.dumps(found)

    def _ask(self, *, speeds: bool = True) -> tuple[StatusReply | None, StatusReply, float]:
        """An earlier reply if there is one, the newest, and the seconds between them."""
        if self._client is None:
            self._client = Client(self._instance.ready["local_endpoint"], timeout_s=ANSWER_TIMEOUT_S)
        if self._last is None and speeds:
            first = self._client.status()
            self._last = (time.monotonic(), first)
            if first.live_count:
                time.sleep(INTERVAL_S)
        now_s, reply = time.monotonic(), self._client.status()
        then_s, earlier = self._last or (now_s, None)
        self._last = (now_s, reply)
        return earlier, reply, now_s - then_s


def describe(earlier: StatusReply | None, reply: StatusReply, seconds: float) -> list[str]:
    """An engine's state and figures, a line each.

    Args:
        earlier: what it said before; None for no speeds.
        reply: what it says now.
        seconds: between the two.
    """
    lines = [f"  state     {reply.state}{': ' + reply.detail if reply.detail else ''}"]
    figures = reply.figures
    if not figures:
        return lines
    swapped = f", {figures['swapped_count']} swapped out" if figures["swapped_count"] else ""
    lines.append(f"  requests  {figures['running_count']} running, {figures['waiting_count']} waiting{swapped}")
    total = max(1, figures["total_block_count"])
    held = total - figures["free_block_count"] - figures["cached_block_count"]
    size = reply.limits.get("block_size", 0)
    lines.append(
        f"  KV cache  {held / total:.0%} held, {figures['cached_block_count'] / total:.0%} cached, "
        f"of {total:,} blocks of {size} tokens"
    )
    if earlier is not None and reply.live_count:
        lines.append("  speed     " + _speed(earlier.figures, figures, seconds))
    found = figures["prefix_hit_tokens"] / max(1, figures["prefix_query_tokens"])
    count = figures.get("restarts", 0)
    restarts = f", {count} restart{'s' * (count > 1)}" if count else ""
    lines.append(
        f"  in all    {figures['prompt_tokens']:,} tokens in ({found:.0%} from the prefix cache), "
        f"{figures['output_tokens']:,} out, {figures['preemptions']:,} preemptions{restarts}"
    )
    return lines


def _speed(then: Mapping[str, int], now: Mapping[str, int], seconds: float) -> str:
    def grown(name: str) -> float:
        return max(0, now[name] - then.get(name, 0))

    steps = grown("steps")
    text = f"{grown('output_tokens') / seconds:,.0f} tokens/s out, {grown('chunk_tokens') / seconds:,.0f} in"
    if not steps:
        return text
    rows = grown("decode_tokens") / steps
    parts = ", ".join(f"{part} {_us(grown(f'step_{part}_us') / steps)}" for part in STEP_PARTS)
    return f"{text}; {steps / seconds:,.0f} steps/s of {rows:.1f} sequences\n  a step    {parts}"


def _us(value: float) -> str:
    return f"{value / 1000:.1f} ms" if value >= 1000 else f"{value:.0f} us"


def duration(seconds: float) -> str:
    """Seconds as hours, minutes and seconds."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
