"""Installs the patches and makes sure they are in place: SGLang only logs a hook that fails."""

from __future__ import annotations

import inspect
import pkgutil
from importlib.metadata import version

from sglang.srt.plugins.hook_registry import HookRegistry

from engine_patches import patches
from engine_patches.errors import Refusal
from engine_patches.patches.patch import Patch

TESTED_SGLANG = ("0.5.23",)


def check_version() -> None:
    """Refuse an SGLang whose internals these patches were not tested with. Raises Refusal."""
    installed = version("sglang")
    if installed not in TESTED_SGLANG:
        raise Refusal(
            f"sglang {installed} is installed, RaggedKV is tested with {', '.join(TESTED_SGLANG)}; "
            f"install sglang=={TESTED_SGLANG[-1]}"
        )


def resolve(target: str) -> object:
    """The callable at a dotted path. Raises Refusal if SGLang has none there."""
    owner, name = target.rsplit(".", 1)
    try:
        return getattr(pkgutil.resolve_name(owner), name)
    except (ImportError, AttributeError) as error:
        raise Refusal(f"SGLang has no {target}: {error}") from error


def check_target(patch: Patch) -> None:
    """Refuse a target that is missing or takes other parameters. Raises Refusal."""
    found = tuple(inspect.signature(inspect.unwrap(_raw(patch.target))).parameters)
    if found != patch.parameters:
        raise Refusal(
            f"SGLang's {patch.target} takes {', '.join(found)}; "
            f"RaggedKV was written for {', '.join(patch.parameters)}"
        )


def _raw(target: str) -> object:
    """As ``resolve``, but a class method keeps its ``cls`` parameter."""
    method = resolve(target)
    return getattr(method, "__func__", method)


def install_cli() -> None:
    """Register the flags' patches; SGLang applies them after its plugins are loaded."""
    _register(patches.CLI)


def install_engine() -> None:
    """Check every target, patch it and check that the patch holds. Raises Refusal."""
    check_version()
    install(patches.ENGINE)


def install(group: tuple[Patch, ...]) -> None:
    """Check the targets of ``group``, patch them and check that it holds. Raises Refusal."""
    for patch in group:
        check_target(patch)
    _register(group)
    HookRegistry.apply_hooks()
    _check_group(group)


def check_installed() -> None:
    """Refuse to go on if a patch of the engine is not in place. Raises Refusal."""
    _check_group(patches.ENGINE)


def _check_group(group: tuple[Patch, ...]) -> None:
    for patch in group:
        if not is_installed(patch):
            raise Refusal(f"the patch of SGLang's {patch.target} did not take; see the log above")


def is_installed(patch: Patch) -> bool:
    """Whether SGLang's function now calls our hook."""
    return patch.target in HookRegistry._patched and _wraps(patch)


def _wraps(patch: Patch) -> bool:
    """Whether the function now at the target is a wrapper that calls our hook."""
    method = _raw(patch.target)
    while method is not None:
        cells = [c.cell_contents for c in getattr(method, "__closure__", None) or ()]
        if any(cell is patch.hook for cell in cells):
            return True
        method = getattr(method, "__wrapped__", None)
    return False


def _register(group: tuple[Patch, ...]) -> None:
    for patch in group:
        hooks = HookRegistry._hooks[patch.target]
        if not any(hook is patch.hook for _, hook, _ in hooks):
            HookRegistry.register(patch.target, patch.hook, patch.kind)
