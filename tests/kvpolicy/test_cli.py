"""``python -m kvpolicy`` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvpolicy
from kvpolicy.artifact import load_artifact

REPO = Path(kvpolicy.__file__).parents[1]


@pytest.fixture
def cli(tmp_path):
    """Run the command line in an empty folder; returns the finished process."""

    def run(*args: object) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "kvpolicy", *map(str, args)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(REPO), "RAGGEDKV_ARTIFACTS": ""},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@pytest.fixture
def ok(cli):
    """Run the command line, require success, return stdout."""

    def run(*args: object) -> str:
        done = cli(*args)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return run


def new_policy(ok, model: Path, out: Path, *options: object) -> Path:
    return Path(ok("new", "--model", model, "--out", out, *options).strip())


def test_new_show_verify_list(ok, model_dir, tmp_path):
    model, out = model_dir("gemma3"), tmp_path / "artifacts"
    options = ("--kind", "uniform", "--window", 1024, "--sinks", 4)
    folder = new_policy(ok, model, out, *options)
    assert folder.parent == out / "gemma3" / "uniform-w1024-s4"
    assert load_artifact(folder).manifest.sinks == 4
    shown = ok("show", folder)
    for text in ("15 native", "layers 0-4 N  512", "layer 5    1024", "12.55%", "not calibrated"):
        assert text in shown
    assert ok("show", "uniform-w1024-s4", "--model", model) == shown
    assert ok("verify", folder, "--model", model).startswith(f"ok: uniform-w1024-s4@{folder.name}")
    assert f"uniform-w1024-s4@{folder.name}" in ok("list")
    assert new_policy(ok, model, out, *options) == folder


@pytest.mark.parametrize("kind", ["full", "native"])
def test_new_built_in_kinds(kind, ok, model_dir, tmp_path):
    folder = new_policy(ok, model_dir("gemma3"), tmp_path / "out", "--kind", kind)
    assert folder.parent.name == kind
    assert "full" in ok("show", folder)


def test_verify_says_when_only_the_config_differs(ok, model_dir, tmp_path):
    folder = new_policy(ok, model_dir("qwen3"), tmp_path / "out", "--kind", "native")
    changed = model_dir("qwen3", rope_theta=1.0)
    assert "another config.json" in ok("verify", folder, "--model", changed)


def test_plan_table_and_json(ok, model_dir):
    args = ("plan", "--model", model_dir("qwen3_6_27b"), "--policy", "native", "--memory", "80GB")
    table = ok(*args, "--context", 131072)
    for text in ("estimated from config.json", "8.59 GB", "153.94 MB per request", "dense"):
        assert text in table
    (row,) = [line for line in table.splitlines() if "recurrent state per request" in line]
    assert row.count("153.94 MB") == 2 and "1.000" in row, "dense and policy alike"
    options = ("--weights-bytes", "54GB", "--overhead-bytes", "6GB", "--context", 131072)
    plan = json.loads(ok(*args, *options, "--json"))
    assert plan["kv_budget_bytes"] == 20 * 10**9
    assert plan["dense"]["bytes_per_request"] == 131072 * 65536
    fp32 = json.loads(ok(*args, *options, "--kv-dtype", "fp32", "--json"))
    assert fp32["dense"]["bytes_per_request"] == 2 * 131072 * 65536


def test_plan_by_name_shows_native_windows_too(ok, model_dir, tmp_path):
    model = model_dir("gemma3")
    new_policy(
        ok, model, tmp_path / "artifacts", "--kind", "uniform", "--window", 512, "--sinks", 4
    )
    table = ok("plan", "--model", model, "--policy", "uniform-w512-s4", "--memory", "2GiB")
    for text in ("dense (stock)", "native windows", "uniform-w512-s4@", "unlimited"):
        assert text in table


BAD = [
    (("new", "--model", "{m}", "--kind", "uniform", "--out", "o"), "needs --window N"),
    (("new", "--model", "{m}", "--kind", "native", "--window", "4", "--out", "o"), "takes no"),
    (("new", "--model", "{m}", "--kind", "uniform", "--window", "0", "--out", "o"), "1..2147"),
    (("new", "--model", "{m}", "--kind", "uniform", "--window", "x", "--out", "o"), "invalid int"),
    (("new", "--model", "{m}", "--kind", "odd", "--out", "o"), "invalid choice: 'odd'"),
    (("new", "--model", "{m}", "--kind", "full", "--out", "o", "--name", "A b"), "not accepted"),
    (("new", "--model", "{m}", "--kind", "full", "--out", "o", "--name", "native"), "built-in"),
    (("new", "--model", "nowhere", "--kind", "full", "--out", "o"), "no config.json in nowhere"),
    (("new", "--kind", "full", "--out", "o"), "required: --model"),
    (("show", "nowhere"), "no folder nowhere"),
    (("show", "native", "--model", "{m}"), "built in"),
    (("verify", "."), "is not a policy"),
    (("plan", "--model", "{m}", "--policy", "none", "--memory", "80GB"), "no policy 'none'"),
    (("plan", "--model", "{m}", "--policy", "native", "--memory", "80"), "no memory is left"),
    (("plan", "--model", "{m}", "--policy", "native", "--memory", "80XB"), "not understood"),
    (("plan", "--model", "{m}", "--policy", "native", "--memory", "1GB", "--context", "0"), ">= 1"),
    ((), "COMMAND"),
    (("fly",), "invalid choice: 'fly'"),
]


@pytest.mark.parametrize("args, message", BAD)
def test_bad_input_is_one_line_and_writes_nothing(args, message, cli, model_dir, tmp_path):
    model = model_dir("smollm2")
    done = cli(*(arg.format(m=model) for arg in args))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("kvpolicy: ") and done.stderr.count("\n") == 1
    assert message in done.stderr
    assert not (tmp_path / "o").exists()


def test_damaged_policy_is_one_line(cli, ok, model_dir, tmp_path):
    folder = new_policy(ok, model_dir("smollm2"), tmp_path / "artifacts", "--kind", "native")
    (folder / "policy.safetensors").write_bytes(b"x")
    for args in (("verify", folder), ("show", folder), ("list",)):
        done = cli(*args)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1 and "sha256" in done.stderr


def test_foreign_policy_is_refused_by_verify(cli, ok, model_dir, tmp_path):
    folder = new_policy(ok, model_dir("smollm2"), tmp_path / "out", "--kind", "native")
    done = cli("verify", folder, "--model", model_dir("gemma3"))
    assert done.returncode == 2 and "made for smollm2" in done.stderr


def test_start_up_loads_neither_torch_nor_an_engine(cli):
    program = (
        "import sys, kvpolicy.__main__ as m; m.build_parser();"
        "sys.exit(any(n in sys.modules for n in ('torch', 'transformers', 'sglang')))"
    )
    env = os.environ | {"PYTHONPATH": str(REPO)}
    assert subprocess.run([sys.executable, "-c", program], env=env, timeout=60).returncode == 0
