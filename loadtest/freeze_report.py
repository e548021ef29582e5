"""The freeze benchmark's table, and what it says in sentences."""

from __future__ import annotations

from rich.box import HORIZONTALS
from rich.table import Table

from kvpolicy.render import human_bytes
from loadtest.freeze_results import Batch, Ratio, Result, Side


def table(result: Result) -> Table:
    """One row a server; fits 100 columns."""
    sizes = f"prompts of {result.prompt_tokens} tokens, {result.output_tokens} of output"
    title = (
        f"{result.model}: {sizes}, {human_bytes(result.kv_bytes)} of KV cache for each server, "
        f"frozen to {result.budget_tokens} tokens"
    )
    grid = Table(title=title, title_justify="left", box=HORIZONTALS, show_lines=True)
    grid.padding = 0
    grid.add_column("server")
    for heading in (
        "decode\ntogether\n(predicted)", "KV of each\nrequest\ndecoding",
        f"output\ntokens/s\nat batch {result.sides[0].equal.finished}",
        "output\ntokens/s\nat its largest",
        "while\ndecoding\nat its largest", "prompt\nkept", "re-\ntracted",
    ):  # fmt: skip
        grid.add_column(heading, justify="right")
    for side in result.sides:
        grid.add_row(*_cells(side, result.sides[0]))
    return grid


def _cells(side: Side, stock: Side) -> list[str]:
    def rate(batch: Batch, name: str, base: Batch) -> str:
        ours, theirs = getattr(batch, name), getattr(base, name)
        return f"{ours:.2f}\n({ours / theirs:.2f}x)"

    return [
        side.name.replace(" ", "\n"),
        f"{side.largest.peak_decoding}\n({side.predicted})",
        f"{side.request_bytes / 1e6:.1f} MB",
        rate(side.equal, "tokens_per_second", stock.equal),
        rate(side.largest, "tokens_per_second", stock.largest),
        rate(side.largest, "decode_tokens_per_second", stock.largest),
        "100 %" if side.kept_share is None else f"{side.kept_share:.1%}",
        str(side.retractions),
    ]


def meaning(result: Result) -> list[str]:
    """The measured ratios, and what to think of them."""
    stock, frozen = result.sides[0], result.sides[-1]
    together = frozen.largest.peak_decoding / max(1, stock.largest.peak_decoding)
    lines = [
        f"Frozen requests that decode together: {together:.2f}x stock's "
        f"({frozen.largest.withdrawn} of {frozen.largest.sent} sent had to wait: withdrawn).",
        _work(stock, frozen),
        _first_token(result),
        "A frozen answer is not the full model's: it reads only the prompt tokens that were kept. "
        "What that costs in quality is not measured here.",
    ]
    if result.machine.busy:
        lines.append(
            f"Other work ran on this machine (load {max(result.machine.loads):.1f} on "
            f"{result.machine.cores} cores): read ratios, not seconds."
        )
    return lines


def _work(stock: Side, frozen: Side) -> str:
    """Output per CPU second: other work on the machine counts less in it than in a rate."""
    equal, largest = (
        getattr(frozen, name).tokens_per_cpu_second / getattr(stock, name).tokens_per_cpu_second
        for name in ("equal", "largest")
    )
    return (
        f"Output tokens per CPU second, frozen: {equal:.2f}x stock's at batch "
        f"{stock.equal.finished}, {largest:.2f}x at each one's largest."
    )


def _first_token(result: Result) -> str:
    first = result.first_token
    return (
        f"Time to the first token of one cold prompt, {first.ratio.n} pairs: "
        f"{first.off_median:.2f} s without and {first.on_median:.2f} s with the freeze, "
        f"ratio {ratio_text(first.ratio)}; CPU seconds, ratio {ratio_text(first.cpu_ratio)}."
    )


def ratio_text(ratio: Ratio) -> str:
    """``1.03 [1.01, 1.05]``."""
    return f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
