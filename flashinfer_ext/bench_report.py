"""Tables of a results file. Ratios compare lines of one run only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Line = dict[str, Any]
OURS = "raggedkv triton"
COLUMNS = ("case", "contender", "median us", "p10", "p90", "GB/s or TFLOP/s", "of copy", "x ours")


def runs_of(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Lines by run, in the order of their first lines."""
    runs: dict[str, list[Line]] = {}
    for line in lines:
        runs.setdefault(line["run"]["id"], []).append(line)
    return runs


def rows_of(lines: Sequence[Line]) -> Iterator[tuple[str, ...]]:
    """A table row per benchmark line of one run; the last column is time over our Triton's."""
    ours = {
        line["case"]: line["median_us"] for line in lines
        if line.get("contender") == OURS and line.get("status") == "ok"
    }  # fmt: skip
    last = None
    for line in lines:
        if "case" not in line:
            continue
        case, last = (line["case"] if line["case"] != last else ""), line["case"]
        name = line.get("contender", "")
        if line["status"] != "ok":
            yield case, name, f"{line['status']}: {line['reason']}", "", "", "", "", ""
            continue
        yield (
            case, name, f"{line['median_us']:.1f}", f"{line['p10_us']:.1f}",
            f"{line['p90_us']:.1f}", _speed(line),
            f"{line['roofline']:.2f}" if "roofline" in line else "",
            _ratio(line, ours.get(line["case"])),
        )  # fmt: skip


def _ratio(line: Line, ours: float | None) -> str:
    if not ours or line.get("kind") == "replay":
        return ""
    return f"{line['median_us'] / ours:.2f}"


def _speed(line: Line) -> str:
    if "tflops" in line:
        return f"{line['tflops']:.1f} TFLOP/s"
    return f"{line['bytes_per_s'] / 1e9:.0f} GB/s" if "bytes_per_s" in line else ""


def heading_of(lines: Sequence[Line]) -> list[str]:
    """What describes a run: GPU, versions, commit, command, tests, what was not begun."""
    run = lines[0]["run"]
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    text = [f"run {run['id']} on {run['gpu']} ({versions})", f"command: {run['command']}"]
    if run.get("commit"):
        text.append(f"commit: {run['commit']}")
    if run.get("dry_run"):
        text.append("DRY RUN in Triton's interpreter on a CPU: times mean nothing")
    for line in lines:
        if line["kind"] == "tests":
            counts = ", ".join(f"{n} {what}" for what, n in line.get("counts", {}).items())
            reason = f": {line['reason']}" if "reason" in line else ""
            text.append(f"tests: {line['status']}{f' ({counts})' if counts else ''}{reason}")
            text += [f"  {each}" for each in (*line.get("notes", ()), *line.get("failures", ()))]
        if line["kind"] == "end" and line["not_begun"]:
            text.append(f"not begun, out of time: {len(line['not_begun'])} cases")
    return text


def print_report(lines: Sequence[Line]) -> None:
    """Print every run's heading and table, with rich where it is installed."""
    for run in runs_of(lines).values():
        print("\n".join(heading_of(run)))
        rows = list(rows_of(run))
        if not rows:
            continue
        try:
            _rich_table(rows)
        except ImportError:
            print("\n".join(plain_table(rows)))


def plain_table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of aligned columns: a reason, which is long, does not widen its column."""
    everything = [COLUMNS, *rows]
    widths = [max(len(row[i]) for row in everything if i < 2 or row[3]) for i in range(8)]
    return [
        "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in everything
    ]


def _rich_table(rows: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for index, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if index < 2 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    Console(width=console.width if console.is_terminal else 150, markup=False).print(table)
