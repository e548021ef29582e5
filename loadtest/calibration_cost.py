"""``python -m loadtest calibration-cost``: what SeqCalib costs, and what it grows with.

Runs ``python -m calib_cluster seqcalib`` on a base setting and on settings that differ from it in
one thing, then fits a line through each series. CPU seconds are those of the workers, model
loading included; peak memory is the largest worker's resident set.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvpolicy.geometry import read_geometry
from kvpolicy.render import make_console
from loadtest.demo_workload import model_folder
from loadtest.errors import UserError
from loadtest.result_files import write_json, write_png

RESULT_FILE = "calibration-cost.json"
PLOT_FILE = "calibration-cost.png"


class Setting(msgspec.Struct, frozen=True):
    """One run: ``codebook`` counts finite windows; ``layers`` are the model's first ones."""

    prompts: int = 4
    length: int = 1024
    codebook: int = 4
    taus: int = 1
    layers: int = 10
    workers: int = 1

    def arguments(self) -> list[str]:
        """Options of ``python -m calib_cluster seqcalib``; small windows, so that all bind."""
        windows = ",".join(str(32 * (i + 1)) for i in range(self.codebook))
        taus = ",".join(f"{0.99 - 0.02 * i:g}" for i in range(self.taus))
        return [
            "--prompts", str(self.prompts), "--length", str(self.length), "--tau", taus,
            "--codebook", f"{windows},full", "--workers", str(self.workers), "--corpus", "stdlib",
        ]  # fmt: skip


SERIES: dict[str, Sequence[int]] = {
    "prompts": (2, 4, 8), "length": (512, 1024, 2048), "codebook": (2, 4, 8),
    "taus": (1, 2, 4), "layers": (5, 10, 20), "workers": (1, 2),
}  # fmt: skip


class Cost(msgspec.Struct, frozen=True):
    """What one run took: wall clock from the start of its workers, seconds and bytes.

    The predicted peak counts the whole checkpoint, also where only its first layers are used.
    """

    setting: Setting
    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int
    predicted_peak_bytes: int


class Slope(msgspec.Struct, frozen=True):
    """A line through one series: CPU seconds and bytes per unit, and its fit (r squared)."""

    over: str
    cpu_seconds: float
    cpu_fit: float
    peak_bytes: float
    peak_fit: float


class Result(msgspec.Struct, frozen=True):
    """Contents of ``calibration-cost.json``."""

    command: list[str]
    model: str
    machine: str
    cores: int
    costs: list[Cost]
    slopes: list[Slope]


def settings() -> list[Setting]:
    """Every setting once, the base first."""
    base = Setting()
    varied = (
        msgspec.structs.replace(base, **{name: value})
        for name, values in SERIES.items()
        for value in values
    )
    return list(dict.fromkeys([base, *varied]))


def series(costs: Sequence[Cost], name: str) -> list[tuple[int, Cost]]:
    """(value, cost) of the runs that differ from the base in ``name`` only, ascending."""
    base = Setting()
    found = [
        (getattr(cost.setting, name), cost)
        for cost in costs
        if msgspec.structs.replace(cost.setting, **{name: getattr(base, name)}) == base
    ]
    return sorted(found, key=lambda pair: pair[0])


def slope(costs: Sequence[Cost], name: str) -> Slope:
    """Least-squares line through a series of three or more runs."""
    pairs = series(costs, name)
    x = np.array([value for value, _ in pairs], dtype=np.float64)
    cpu, cpu_fit = _line(x, np.array([cost.cpu_seconds for _, cost in pairs]))
    peak, peak_fit = _line(x, np.array([cost.peak_bytes for _, cost in pairs], dtype=np.float64))
    return Slope(name, cpu, cpu_fit, peak, peak_fit)


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    gradient, offset = np.polyfit(x, y, 1)
    spread = float(((y - y.mean()) ** 2).sum())
    left = float(((y - gradient * x - offset) ** 2).sum())
    is_flat = spread <= 1e-12 * float((y**2).sum())
    return float(gradient), 1.0 if is_flat else 1 - left / spread


def measure(model: Path, setting: Setting, work: Path) -> Cost:
    """Run one calibration of the model's first layers. Raises UserError with its last line."""
    shortened = _shortened(model, setting.layers, work)
    summary = work / "summary.json"
    command = [
        sys.executable, "-m", "calib_cluster", "seqcalib", "--model", str(shortened),
        "--out", str(work / "artifacts"), "--restart", "--summary", str(summary),
        *setting.arguments(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
        raise UserError(f"calibration failed: {said[-1]}")
    raw = json.loads(summary.read_text())
    return Cost(
        setting, raw["wall_seconds"], raw["cpu_seconds"], raw["peak_bytes"],
        raw["predicted_peak_bytes"],
    )  # fmt: skip


def _shortened(model: Path, layers: int, work: Path) -> Path:
    """The model with its first ``layers`` layers: its own files beside a changed config."""
    folder = work / f"{model.name}-{layers}-layers"
    if not folder.exists():
        folder.mkdir()
        for file in model.iterdir():
            if file.name != "config.json":
                (folder / file.name).symlink_to(file)
        config = json.loads((model / "config.json").read_text())
        config["num_hidden_layers"] = layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def table(result: Result) -> Table:
    """One row per series: its runs, its slope, its fit."""
    grid = Table(title=f"SeqCalib on {result.model}, {result.cores} cores", title_justify="left")
    for name in ("grows with", "values", "CPU seconds", "per unit", "r2", "peak GB", "per unit"):
        grid.add_column(name, justify="right")
    slopes = {found.over: found for found in result.slopes}
    for name in SERIES:
        pairs = series(result.costs, name)
        cpu = ", ".join(f"{cost.cpu_seconds:.1f}" for _, cost in pairs)
        peak = ", ".join(f"{cost.peak_bytes / 1e9:.2f}" for _, cost in pairs)
        found = slopes.get(name)
        rate = f"{found.cpu_seconds:.3g} s" if found else "-"
        fit = f"{found.cpu_fit:.3f}" if found else "-"
        memory = f"{found.peak_bytes / 1e6:.3g} MB" if found else "-"
        values = ", ".join(str(value) for value, _ in pairs)
        grid.add_row(name, values, cpu, rate, fit, peak, memory)
    return grid


def workers_line(costs: Sequence[Cost]) -> str:
    """One against two workers, as ratios of one run's figures."""
    (_, one), (_, two) = series(costs, "workers")
    return (
        f"2 workers against 1: {two.wall_seconds / one.wall_seconds:.2f} of the time, "
        f"{two.cpu_seconds / one.cpu_seconds:.2f} of the CPU seconds, "
        f"{two.peak_bytes / one.peak_bytes:.2f} of the memory each"
    )


def plot(result: Result, path: Path) -> None:
    """CPU seconds over each series, with its line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [found.over for found in result.slopes]
    figure, axes = pyplot.subplots(1, len(names), figsize=(3 * len(names), 3.2), sharey=True)
    for axis, found in zip(axes, result.slopes, strict=True):
        pairs = series(result.costs, found.over)
        x = [value for value, _ in pairs]
        axis.plot(x, [cost.cpu_seconds for _, cost in pairs], "o-")
        axis.set_xlabel(found.over)
        axis.set_xticks(x)
        axis.set_title(f"{found.cpu_seconds:.3g} s each", fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("CPU seconds")
    axes[0].set_ylim(bottom=0)
    figure.suptitle(f"SeqCalib on {result.model}: what it grows with", fontsize=12)
    figure.tight_layout()
    write_png(path, figure, dpi=120)
    pyplot.close(figure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``python -m loadtest calibration-cost``."""
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct", metavar="NAME|DIR", help="default %(default)s")
    add("--out", type=Path, default=Path("out"), metavar="DIR", help="results (default out)")


def run(args: argparse.Namespace) -> int:
    """Measure every setting; writes after each. Raises UserError."""
    model = model_folder(args.model)
    layers = read_geometry(model).layers
    if len(layers) < max(SERIES["layers"]):
        raise UserError(f"--model: at least {max(SERIES['layers'])} layers, found {len(layers)}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {args.out}: {error.strerror}") from error
    console = make_console()
    costs: list[Cost] = []
    with tempfile.TemporaryDirectory(prefix="calibration-cost-") as work:
        for setting in _with_bar(settings(), console):
            costs.append(measure(model, setting, Path(work)))
            write_json(args.out / RESULT_FILE, _result(model, costs))
    result = _result(model, costs)
    plot(result, args.out / PLOT_FILE)
    console.print(table(result))
    console.print(workers_line(costs))
    console.print(f"written: {args.out / RESULT_FILE}, {args.out / PLOT_FILE}")
    return 0


def _result(model: Path, costs: Sequence[Cost]) -> Result:
    fitted = [name for name in SERIES if len(series(costs, name)) > 2]
    return Result(
        command=["python", "-m", "loadtest", *sys.argv[1:]],
        model=model.name,
        machine=platform.processor() or platform.machine(),
        cores=psutil.cpu_count() or 0,
        costs=list(costs),
        slopes=[slope(costs, name) for name in fitted],
    )


def _with_bar(items: Sequence[Setting], console: Console) -> Iterator[Setting]:
    columns: list[Callable | TextColumn] = [
        TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn()
    ]  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("calibrating", total=len(items))
        for item in items:
            bar.update(task, description=f"calibrating {' '.join(item.arguments()[:4])}")
            yield item
            bar.advance(task)
