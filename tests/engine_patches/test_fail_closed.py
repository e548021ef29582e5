"""Asked for a policy, the server runs it or does not start, whatever is broken.

SGLang only logs a plugin or a hook that fails, so each break here would otherwise end in a stock
server. Python runs ``sitecustomize`` before anything else: that is where these tests break things.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_patches.serving import REQUEST_VARIABLE
from kvpolicy.artifact import PointSpec, write_artifact
from kvpolicy.geometry import ModelGeometry, geometry_from_config, read_geometry
from kvpolicy.windows import WindowPolicy
from tests.engine_patches.launching import Outcome, launch, parse_many
from tests.engine_patches.test_refusals import LLAMA

TREE = "sglang.srt.mem_cache.unified_radix_cache"
CHECKPOINT = f"{TREE}.UnifiedRadixCache.checkpoint_into_tree"

# After module {module} is imported, runs {code} with it in scope, if {where} holds.
_BREAK = """
import importlib.abc, importlib.util, os, sys

class Breaker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != {module!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            exec({code!r}, {{"module": module}})
        spec.loader.exec_module = exec_module
        return spec

in_child = {variable!r} in os.environ
if {where}:
    sys.meta_path.insert(0, Breaker())
"""
EVERYWHERE, IN_CHILDREN = "True", "in_child"
UNIMPORTABLE = "raise ImportError('broken on purpose')"


@pytest.fixture
def broken(tmp_path) -> Callable[..., dict[str, str]]:
    """``broken(module, code, where)``: an environment whose Python runs ``code`` in a module."""

    def make(module: str, code: str, where: str = EVERYWHERE) -> dict[str, str]:
        text = _BREAK.format(module=module, code=code, where=where, variable=REQUEST_VARIABLE)
        (tmp_path / "sitecustomize.py").write_text(text)
        return {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}

    return make


@pytest.fixture
def start(smollm2) -> Callable[..., Outcome]:
    """``start(*flags, env=...)``: launch with a policy, expecting that it gives up."""

    def run(*flags: str, env: dict[str, str] | None = None, policy: str = "full") -> Outcome:
        wanted = ["--kv-policy", policy, "--kv-arena-bytes", "64MiB", "--dtype", "float32"]
        outcome = launch("--model-path", str(smollm2), *wanted, *flags, env=env)
        assert outcome.returncode != 0, outcome.stderr[-3000:]
        assert outcome.leftovers == ()
        assert "Uvicorn running" not in outcome.stderr
        return outcome

    return run


# -- a patched target is not what it was -------------------------------------------------------


def test_a_missing_target_in_the_launcher(start, broken):
    env = broken(TREE, "del module.UnifiedRadixCache.checkpoint_into_tree")
    assert f"SGLang has no {CHECKPOINT}" in start(env=env).refused()


def test_other_parameters_in_the_launcher(start, broken):
    code = "module.UnifiedRadixCache.checkpoint_into_tree = lambda self, request: None"
    line = start(env=broken(TREE, code)).refused()
    assert f"{CHECKPOINT} takes self, request; " in line and "self, req, up_to, kwargs" in line


@pytest.mark.slow  # a minute
def test_a_missing_target_in_the_children(start, broken):
    """There, SGLang itself would log the error and go on with dense KV."""
    env = broken(TREE, "del module.UnifiedRadixCache.checkpoint_into_tree", IN_CHILDREN)
    outcome = start(env=env)
    (line,) = set(outcome.refusals)  # each child process may say it
    assert f"SGLang has no {CHECKPOINT}" in line


@pytest.mark.slow
def test_a_hook_that_does_not_take_in_the_children(start, broken):
    code = (
        "apply = module.HookRegistry._apply_target\n"
        "def skip(target, hooks):\n"
        "    if target.endswith('alloc_for_decode'): raise RuntimeError('broken on purpose')\n"
        "    apply(target, hooks)\n"
        "module.HookRegistry._apply_target = skip\n"
    )
    outcome = start(env=broken("sglang.srt.plugins.hook_registry", code, IN_CHILDREN))
    (line,) = set(outcome.refusals)
    assert "mem_cache.allocation.alloc_for_decode did not take" in line


# -- the plugin is not there -------------------------------------------------------------------


def not_understood(outcome: Outcome) -> bool:
    return outcome.returncode == 2 and "unrecognized arguments: --kv-policy" in outcome.stderr


def test_a_plugin_that_cannot_be_imported(start, broken):
    assert not_understood(start(env=broken("engine_patches.plugin", UNIMPORTABLE)))


@pytest.mark.slow  # a minute
def test_a_plugin_that_cannot_be_imported_in_the_children(start, broken):
    """The backend's name is then unknown, so SGLang cannot build a runner."""
    outcome = start(env=broken("engine_patches.plugin", UNIMPORTABLE, IN_CHILDREN))
    assert "raggedkv" in outcome.stderr


def test_a_plugin_that_is_not_on_the_users_list(start):
    assert not_understood(start(env={"SGLANG_PLUGINS": "other"}))


@pytest.mark.parametrize("target", ["from_cli_args", "add_cli_args"])
def test_flags_that_nobody_would_read_are_not_offered(start, broken, target):
    code = (
        "apply = module.HookRegistry._apply_target\n"
        "def skip(target, hooks):\n"
        f"    if target.endswith({target!r}): raise RuntimeError('broken on purpose')\n"
        "    apply(target, hooks)\n"
        "module.HookRegistry._apply_target = skip\n"
    )
    assert not_understood(start(env=broken("sglang.srt.plugins.hook_registry", code)))


# -- the policy is not what it should be -------------------------------------------------------


def written(root: Path, geometry: ModelGeometry, name: str) -> Path:
    point = PointSpec("only", WindowPolicy.full(geometry))
    return write_artifact(root, model_name="model", name=name, points=[point])


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def damaged(good: Path, root: Path) -> dict[str, Path]:
    """Copies of an artifact, each damaged in its own way, by what the refusal must name."""
    ways: dict[str, Callable[[Path], None]] = {
        "policy.safetensors": lambda f: flip(f / "policy.safetensors", -1),
        "manifest.json": lambda f: flip(f / "manifest.json", len("{") + 3),
        "policy.safetensors is missing": lambda f: (f / "policy.safetensors").unlink(),
        "extra.bin": lambda f: (f / "extra.bin").write_bytes(b"x"),
        "no manifest.json": lambda f: (f / "manifest.json").unlink(),
    }
    copies = {}
    for number, (named, damage) in enumerate(ways.items()):
        copies[named] = Path(shutil.copytree(good, root / str(number) / good.name))
        damage(copies[named])
    return copies


def test_a_damaged_missing_or_foreign_policy(smollm2, tmp_path):
    good = written(tmp_path / "good", read_geometry(smollm2), "mine")
    cases = damaged(good, tmp_path / "damaged")
    cases["was made for model"] = written(tmp_path / "foreign", geometry_from_config(LLAMA), "its")
    cases["no policy"] = tmp_path / "nowhere"
    served = ["--model-path", str(smollm2), "--kv-policy"]
    lines = [[*served, str(policy)] for policy in [good, *cases.values()]]
    accepted, *refused = parse_many(lines, tmp_path)
    assert accepted.returncode == 0, accepted.stderr
    for (named, policy), outcome in zip(cases.items(), refused, strict=True):
        line = outcome.refused()
        assert named.split()[0] in line and (str(policy) in line or "was made for" in line), line


@pytest.mark.slow
def test_a_policy_damaged_before_the_children_load_it(start, broken, smollm2, tmp_path):
    good = written(tmp_path / "policies", read_geometry(smollm2), "mine")
    flip_again = f"open({str(good / 'policy.safetensors')!r}, 'ab').write(b'x')"
    env = broken("engine_patches.serving", flip_again, IN_CHILDREN)
    (line,) = set(start(policy=str(good), env=env).refusals)
    assert "policy.safetensors" in line


def test_the_launcher_ends_on_a_damaged_policy(start, smollm2, tmp_path):
    good = written(tmp_path / "policies", read_geometry(smollm2), "mine")
    flip(good / "policy.safetensors", -1)
    assert str(good) in start(policy=str(good)).refused()


@pytest.mark.slow  # a minute
def test_an_arena_too_small_is_refused_where_the_pool_is_built(start):
    line = start("--kv-arena-bytes", "64KiB").refused()
    assert "an arena of 65536 bytes" in line and "--kv-arena-bytes" in line
