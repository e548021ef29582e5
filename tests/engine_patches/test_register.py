"""The register of patches: mirrored here, true of the installed SGLang, and checked in place."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import logging
import pkgutil
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from engine_patches import patches, register
from engine_patches.errors import Refusal
from engine_patches.patches.patch import Patch

AROUND, AFTER = HookType.AROUND, HookType.AFTER

# Adding or removing a patch means saying so here, too.
CLI = {
    ("server_args.ServerArgs.add_cli_args", AFTER),
    ("server_args.ServerArgs.from_cli_args", AROUND),
}
ENGINE = {
    ("platforms.interface.SRTPlatform.get_kv_pool_cls", AROUND),
    ("platforms.interface.SRTPlatform.get_paged_allocator_cls", AROUND),
    ("mem_cache.kv_cache_configurator.KVCacheConfigurator.config_from_budget", AROUND),
    ("managers.scheduler.Scheduler.get_prefill_adder_class", AROUND),
    ("mem_cache.allocation.alloc_for_extend", AROUND),
    ("mem_cache.allocation.alloc_for_decode", AROUND),
    ("model_executor.forward_batch_info.ForwardBatch.init_new", AFTER),
    ("model_executor.model_runner.ModelRunner.forward", AROUND),
    ("layers.logits_processor.LogitsProcessor.forward", AROUND),
    ("mem_cache.unified_radix_cache.UnifiedRadixCache.match_prefix", AROUND),
    ("mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree", AROUND),
    ("mem_cache.common.release_kv_cache", AROUND),
    ("managers.scheduler.Scheduler.init_req_max_new_tokens", AROUND),
    ("sampling.sampling_params.SamplingParams.verify", AFTER),
    ("managers.tokenizer_manager.TokenizerManager.update_request_meta_info", AROUND),
    ("models.utils.enable_fused_set_kv_buffer", AROUND),
    (
        "managers.scheduler_components.internal_state."
        "SchedulerInternalStateController.get_internal_state",
        AFTER,
    ),
    ("managers.tokenizer_control_mixin.TokenizerControlMixin.open_session", AROUND),
    ("session.session_controller.SessionController.open", AROUND),
}


def named(group: tuple[Patch, ...]) -> set[tuple[str, HookType]]:
    return {(patch.target.removeprefix("sglang.srt."), patch.kind) for patch in group}


def by_target(patch: Patch) -> str:
    return patch.target.rsplit(".", 2)[-1]


def patch_modules() -> list[types.ModuleType]:
    names = [m.name for m in pkgutil.iter_modules(patches.__path__) if m.name != "patch"]
    return [importlib.import_module(f"{patches.__name__}.{name}") for name in names]


# -- the table ---------------------------------------------------------------------------------


def test_every_patch_is_listed_here():
    assert (named(patches.CLI), len(patches.CLI)) == (CLI, len(CLI))
    assert (named(patches.ENGINE), len(patches.ENGINE)) == (ENGINE, len(ENGINE))
    assert patches.ALL == patches.CLI + patches.ENGINE


def test_every_patch_file_is_in_the_register():
    in_files = {patch.target for module in patch_modules() for patch in module.PATCHES}
    assert in_files == {patch.target for patch in patches.ALL}


@pytest.mark.parametrize("module", patch_modules(), ids=lambda m: m.__name__.rsplit(".", 1)[-1])
def test_a_patch_file_says_what_it_is_for_and_holds_its_own_hooks(module):
    assert len(module.__doc__ or "") > 10
    for patch in module.PATCHES:
        assert min(len(patch.why), len(patch.how), len(patch.until)) > 10, patch.target
        assert patch.hook.__module__ == module.__name__


# -- the installed SGLang ----------------------------------------------------------------------


def source_parameters(target: str) -> tuple[str, ...]:
    """Parameter names of ``target`` read from SGLang's source text, without importing it."""
    parts = target.split(".")
    path = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    steps = iter(parts[1:])
    while not path.with_suffix(".py").is_file():
        path /= next(steps)
    scope: ast.AST = ast.parse(path.with_suffix(".py").read_text())
    for name in steps:
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        (scope,) = [node for node in scope.body if isinstance(node, kinds) and node.name == name]
    taken = scope.args
    names = [a.arg for a in taken.posonlyargs + taken.args]
    names += [taken.vararg.arg] if taken.vararg else []
    names += [a.arg for a in taken.kwonlyargs]
    return tuple(names + ([taken.kwarg.arg] if taken.kwarg else []))


@pytest.mark.parametrize("patch", patches.ALL, ids=by_target)
def test_the_installed_sglang_has_the_target_with_these_parameters(patch):
    assert source_parameters(patch.target) == patch.parameters
    register.check_target(patch)


def test_another_sglang_is_refused_by_both_versions(monkeypatch):
    register.check_version()
    monkeypatch.setattr(register, "version", lambda name: "0.5.24")
    with pytest.raises(Refusal, match=r"sglang 0\.5\.24 .*0\.5\.23"):
        register.check_version()


@pytest.mark.parametrize("patch", patches.ALL, ids=by_target)
def test_other_parameters_are_refused_naming_both_lists(patch, monkeypatch):
    owner, name = patch.target.rsplit(".", 1)
    monkeypatch.setattr(pkgutil.resolve_name(owner), name, lambda one, another: None)
    with pytest.raises(Refusal) as refusal:
        register.check_target(patch)
    message = str(refusal.value)
    assert patch.target in message and "\n" not in message
    assert "one, another" in message and ", ".join(patch.parameters) in message


def test_a_missing_function_or_module_is_refused_by_name():
    patch = patches.ENGINE[0]
    for target in (
        "sglang.srt.mem_cache.common.no_such_function",
        "sglang.srt.no_such_module.function",
        "sglang.srt.mem_cache.unified_radix_cache.NoSuchClass.method",
    ):
        with pytest.raises(Refusal) as refusal:
            register.check_target(replace(patch, target=target))
        assert target in str(refusal.value) and "\n" not in str(refusal.value)


# -- in place ----------------------------------------------------------------------------------


def hook(original, left, right):
    return original(left, right) + 1


def other_hook(original, left, right):
    return original(left, right)


@pytest.fixture
def stock(monkeypatch):
    """A module with ``add(left, right)`` and its class method, and an empty HookRegistry."""
    module = types.ModuleType("stock_engine")
    module.add = lambda left, right: left + right
    module.Adder = type("Adder", (), {"add": classmethod(lambda cls, left, right: left + right)})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    return module


@pytest.fixture
def engine(monkeypatch):
    """``engine(target)``: the register's engine patches become one patch of ``target``."""

    def make(target: str, parameters=("left", "right"), function=hook) -> Patch:
        patch = Patch(target, parameters, function, AROUND, "why", "how", "until")
        monkeypatch.setattr(patches, "ENGINE", (patch,))
        return patch

    return make


def test_install_patches_a_function(stock, engine):
    engine("stock_engine.add")
    register.install_engine()
    assert stock.add(1, 2) == 4


def test_install_twice_hooks_once(stock, engine):
    engine("stock_engine.add")
    register.install_engine()
    register.install_engine()
    assert stock.add(1, 2) == 4


def test_install_patches_a_class_method(stock, engine):
    engine(
        "stock_engine.Adder.add",
        parameters=("cls", "left", "right"),
        function=lambda original, cls, left, right: original(cls, left, right) + 1,
    )
    register.install_engine()
    assert stock.Adder.add(1, 2) == 4


def test_a_hook_that_sglang_failed_to_apply_is_refused(stock, engine, caplog):
    stock.Kind = type("Kind", (), {"__init__": lambda self, left, right: None})
    engine("stock_engine.Kind")  # SGLang does not hook a class, and only logs that
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(Refusal, match=r"stock_engine\.Kind did not"),
    ):
        register.install_engine()
    assert "Failed to apply hooks" in caplog.text


def test_a_target_another_plugin_patched_before_is_refused(stock, engine):
    """SGLang skips targets it has patched once, so our hook would silently be left out."""
    HookRegistry.register("stock_engine.add", other_hook, AROUND)
    HookRegistry.apply_hooks()
    engine("stock_engine.add")
    with pytest.raises(Refusal, match=r"stock_engine\.add did not take"):
        register.install_engine()


def test_a_patch_shared_with_another_plugin_holds(stock, engine):
    HookRegistry.register("stock_engine.add", other_hook, AROUND)
    engine("stock_engine.add")
    register.install_engine()
    assert stock.add(1, 2) == 4


def test_a_patch_overwritten_later_is_detected(stock, engine):
    engine("stock_engine.add")
    register.install_engine()
    register.check_installed()
    stock.add = lambda left, right: left + right
    with pytest.raises(Refusal, match=r"stock_engine\.add did not take"):
        register.check_installed()


def test_nothing_is_patched_when_one_target_is_wrong(stock, engine, monkeypatch):
    good = engine("stock_engine.add")
    bad = replace(good, target="stock_engine.Adder.add", parameters=("cls", "values"))
    monkeypatch.setattr(patches, "ENGINE", (good, bad))
    before = stock.add
    with pytest.raises(Refusal, match=r"stock_engine\.Adder\.add"):
        register.install_engine()
    assert stock.add is before and not HookRegistry._hooks
