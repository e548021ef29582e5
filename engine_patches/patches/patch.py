"""What one patch of an SGLang function is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.plugins.hook_registry import HookType


@dataclass(frozen=True)
class Patch:
    """One hook on one SGLang callable.

    Fields: ``target`` dotted path; ``parameters`` the parameter names it must have; ``hook`` and
    ``kind`` as in SGLang's HookRegistry; ``why`` SGLang cannot do without; ``how`` it is changed;
    ``until`` when the patch can go.
    """

    target: str
    parameters: tuple[str, ...]
    hook: Callable
    kind: HookType
    why: str
    how: str
    until: str
