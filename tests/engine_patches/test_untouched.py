"""Without --kv-policy SGLang is what it was."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from engine_patches.serving import REQUEST_VARIABLE
from tests.engine_patches.launching import run_python
from tests.engine_patches.test_refusals import LLAMA, config_dir

# What a launching process looks like once the arguments are read. A function that SGLang's hook
# registry wrapped has that module's code.
_LOOK = """
import json, os, pkgutil, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
args = prepare_server_args(sys.argv[1:] or json.loads(os.environ["ARGV"]))
from engine_patches import patches, serving

def code_of(target):
    owner, name = target.rsplit(".", 1)
    function = getattr(pkgutil.resolve_name(owner), name)
    return getattr(function, "__func__", function).__code__.co_filename

hooked = [p.target for p in patches.ENGINE if code_of(p.target).endswith("hook_registry.py")]
fields = {name: repr(getattr(args, name)) for name in type(args).__struct_fields__}
print()
print(json.dumps({
    "hooked": hooked,
    "engine": [p.target for p in patches.ENGINE],
    "fields": fields,
    "serves": serving.current() is not None,
    "variable": os.environ.get(serving.REQUEST_VARIABLE),
}))
"""
STALE = '{"model": "/gone", "policy": "full"}'


@pytest.fixture(scope="module")
def look(tmp_path_factory):
    """``look(*flags, env=...)``: the launching process of a small Llama."""
    model = config_dir(tmp_path_factory.mktemp("untouched") / "model", LLAMA)

    def run(*flags: str, env: dict[str, str] | None = None) -> dict:
        argv = json.dumps(["--model-path", str(model), "--random-seed", "0", *flags])
        return run_python(_LOOK, {"ARGV": argv, **(env or {})})

    return run


@pytest.fixture(scope="module")
def without_us(look) -> dict:
    """The same process where SGLang loads our CPU platform, but not our plugin."""
    return look(env={"SGLANG_PLUGINS": "raggedkv_cpu"})


@pytest.mark.parametrize(
    "stale",
    [
        pytest.param(None, id="clean"),
        pytest.param(STALE, id="stale", marks=pytest.mark.slow),
        pytest.param("not json", id="garbage", marks=pytest.mark.slow),
    ],
)
def test_without_the_flag_nothing_is_changed(look, without_us, stale):
    seen = look(env={REQUEST_VARIABLE: stale} if stale else None)
    assert seen["hooked"] == []
    assert not seen["serves"]
    assert seen["variable"] is None
    assert seen["fields"] == without_us["fields"]
    assert seen["fields"]["attention_backend"] == "None"
    assert seen["fields"]["page_size"] == "None"


def test_with_the_flag_everything_is(look):
    """The control: what the test above looks at does change."""
    seen = look("--kv-policy", "full", env={REQUEST_VARIABLE: STALE})
    assert sorted(seen["hooked"]) == sorted(seen["engine"])
    assert seen["serves"]
    assert seen["fields"]["attention_backend"] == "'raggedkv'"
    assert json.loads(seen["variable"])["model"] != "/gone"


def test_help_lists_the_flags():
    shown = subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", "--help"],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert shown.returncode == 0
    assert "--kv-policy DIR|NAME[@VERSION]|native|full" in shown.stdout
    assert "--kv-arena-bytes BYTES" in shown.stdout
