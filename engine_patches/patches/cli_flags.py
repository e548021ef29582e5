"""Adds RaggedKV's ``--kv-*`` flags to SGLang's command line."""

from sglang.srt.plugins.hook_registry import HookType

from engine_patches.patches.patch import Patch


def add_cli_args(result, parser):
    from engine_patches import register
    from engine_patches.flags import add_flags

    # flags that nobody reads would be accepted and ignored
    if all(register.is_installed(patch) for patch in PATCHES):
        add_flags(parser)


def from_cli_args(original, cls, args):
    from engine_patches.flags import take_flags

    take_flags(args)
    return original(cls, args)


PATCHES = (
    Patch(
        target="sglang.srt.server_args.ServerArgs.add_cli_args",
        parameters=("parser",),
        hook=add_cli_args,
        kind=HookType.AFTER,
        why="SGLang has no way for a plugin to add a flag",
        how="adds an argument group after SGLang's own",
        until="plugins can register server arguments",
    ),
    Patch(
        target="sglang.srt.server_args.ServerArgs.from_cli_args",
        parameters=("cls", "args"),
        hook=from_cli_args,
        kind=HookType.AROUND,
        why="the flags must be checked, and the policy loaded, before processes are started",
        how="reads our flags, then lets SGLang read its own; without them nothing changes",
        until="plugins can register server arguments",
    ),
)
