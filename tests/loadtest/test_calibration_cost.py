"""Slopes and tables of the calibration cost, on costs that are known by construction."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from safetensors.numpy import save_file

from loadtest import calibration_cost as cc
from loadtest.errors import UserError


def cost(setting: cc.Setting) -> cc.Cost:
    """3 CPU seconds + 2 a prompt + 0.01 a token + 0.5 a layer, halved wall with two workers."""
    cpu = 3 + 2 * setting.prompts + 0.01 * setting.length + 0.5 * setting.layers
    return cc.Cost(setting, cpu / setting.workers, cpu, 10**9 + 10**6 * setting.layers, 2 * 10**9)


COSTS = [cost(setting) for setting in cc.settings()]


def test_every_setting_differs_from_the_base_in_one_thing() -> None:
    base = cc.Setting()
    for setting in cc.settings()[1:]:
        changed = [n for n in base.__struct_fields__ if getattr(base, n) != getattr(setting, n)]
        assert len(changed) == 1
    assert len(set(cc.settings())) == len(cc.settings())
    for name, values in cc.SERIES.items():
        assert [value for value, _ in cc.series(COSTS, name)] == list(values)


@pytest.mark.parametrize(
    ("name", "cpu", "peak"),
    [("prompts", 2, 0), ("length", 0.01, 0), ("layers", 0.5, 1e6), ("codebook", 0, 0)],
)
def test_slopes_of_exact_lines(name: str, cpu: float, peak: float) -> None:
    found = cc.slope(COSTS, name)
    assert found.cpu_seconds == pytest.approx(cpu, abs=1e-9)
    assert found.peak_bytes == pytest.approx(peak, abs=1e-3)
    assert found.cpu_fit == pytest.approx(1)


def test_workers_are_compared_as_ratios() -> None:
    assert cc.workers_line(COSTS).startswith("2 workers against 1: 0.50 of the time, 1.00 of")


def test_results_are_drawn(tmp_path: Path) -> None:
    slopes = [cc.slope(COSTS, name) for name in cc.SERIES if name != "workers"]
    result = cc.Result(["x"], "tiny", "cpu", 2, COSTS, slopes)
    cc.plot(result, tmp_path / "cost.png")
    assert (tmp_path / "cost.png").stat().st_size > 10_000
    assert cc.table(result).row_count == len(cc.SERIES)
    assert msgspec.json.decode(msgspec.json.encode(result), type=cc.Result) == result


def test_small_models_and_bad_folders_are_refused(tmp_path: Path, smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text()) | {"num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({}, tmp_path / "model.safetensors")
    args = type("Args", (), {"model": str(tmp_path), "out": tmp_path / "out"})
    with pytest.raises(UserError, match="at least 20 layers, found 3"):
        cc.run(args)
    (tmp_path / "file").write_text("")
    args = type("Args", (), {"model": str(smollm2), "out": tmp_path / "file"})
    with pytest.raises(UserError, match="--out"):
        cc.run(args)
