"""RaggedKV's own series on ``/metrics`` (with ``--enable-metrics``), in pages and bytes."""

from __future__ import annotations

import os
import time
from typing import Any

from engine_patches.proof import proof
from engine_patches.serving import Serving

INTERVAL_SECONDS = 0.5
"""A busy server publishes no more often than this; an idle one at once."""

INFO_LABELS = ("point", "tau", "budget", "context", "retention", "prompt_budget", "kernel")


def _info_labels(state: dict[str, Any]) -> list[str]:
    states = {"context": "residency_context"}
    values = (state[states.get(name, name)] for name in INFO_LABELS)
    return ["" if value is None else str(value) for value in values]


class Metrics:
    """Publishes what ``/server_info`` proves. Does nothing where SGLang's metrics are off.

    Series: ``raggedkv:pages{state}``, ``raggedkv:level_pages{window,sinks}``,
    ``raggedkv:level_units{window,sinks}``, ``raggedkv:running_requests``,
    ``raggedkv:bytes_saved``, ``raggedkv:arena_bytes``, ``raggedkv:residency`` and
    ``raggedkv:frozen_requests``, ``raggedkv:frozen_prompt_tokens``, ``raggedkv:frozen_pages``
    and ``raggedkv:<counter>_total``; each with the label ``policy``. ``raggedkv:policy_info`` is 1
    and names what is served in its labels ``point``, ``tau``, ``budget``, ``context``,
    ``retention``, ``prompt_budget`` (empty where there is none) and ``kernel``.
    """

    def __init__(self, served: Serving) -> None:
        self.served = served
        self.enabled = bool(os.environ.get("PROMETHEUS_MULTIPROC_DIR"))
        self._published_at = 0.0
        self._counted: dict[str, int] = {}
        if self.enabled:
            self._create()

    def publish(self, idle: bool) -> None:
        """Set every series to the present state; skipped if busy and recently done."""
        if not self.enabled:
            return
        now = time.monotonic()
        if not idle and now - self._published_at < INTERVAL_SECONDS:
            return
        self._published_at = now
        state = proof(self.served)
        self._info.labels(self.served.policy_id, *_info_labels(state)).set(1)
        for name, pages in state["pages"].items():
            self._pages.labels(self.served.policy_id, name).set(pages)
        for level in state["levels"]:
            labels = (self.served.policy_id, str(level["window"]), str(level["sinks"]))
            self._level_pages.labels(*labels).set(level["pages"])
            self._level_units.labels(*labels).set(level["units"])
        for name, number in state["frozen"].items():
            self._frozen[name].labels(self.served.policy_id).set(number)
        for name, gauge in self._gauges.items():
            gauge.labels(self.served.policy_id).set(state[name])
        for name, total in state["counters"].items():
            grown = total - self._counted.get(name, 0)
            self._counters[name].labels(self.served.policy_id).inc(grown)
            self._counted[name] = total

    def _create(self) -> None:
        # prometheus_client reads its multi-process folder when it is imported
        from prometheus_client import Counter, Gauge

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(
                f"raggedkv:{name}", text, ("policy", *labels), multiprocess_mode="mostrecent"
            )

        self._info = gauge("policy_info", "What is served (always 1).", *INFO_LABELS)
        self._pages = gauge("pages", "Physical pages of the arena by state.", "state")
        self._level_pages = gauge(
            "level_pages", "Live pages of one level, over its units.", "window", "sinks"
        )
        self._level_units = gauge(
            "level_units", "KV heads of all layers in one level.", "window", "sinks"
        )
        self._frozen = {
            "requests": gauge("frozen_requests", "Running requests with a frozen prompt."),
            "prompt_tokens": gauge("frozen_prompt_tokens", "Their prompt tokens."),
            "compact_pages": gauge("frozen_pages", "Pages of what their prompts kept."),
        }
        self._gauges = {
            "requests": gauge("running_requests", "Requests that hold pages."),
            "bytes_saved": gauge("bytes_saved", "Bytes a dense cache would hold beyond ours."),
            "arena_bytes": gauge("arena_bytes", "Bytes of the K and V arena."),
            "residency": gauge("residency", "Kept share of global layers at the info's context."),
        }
        self._counters = {
            name: Counter(f"raggedkv:{name}", f"Total: {name.replace('_', ' ')}.", ("policy",))
            for name in proof(self.served)["counters"]
        }
