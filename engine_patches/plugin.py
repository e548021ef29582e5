"""Entry point ``sglang.srt.plugins``: runs in every SGLang process, before arguments are read."""

from __future__ import annotations


def register() -> None:
    """Offer the flags; in a child of a server that got them, serve the policy.

    An SGLang started without ``--kv-policy`` only gets more flags. A process that was asked to
    serve a policy and cannot is ended here, since SGLang would only log the error.
    """
    from engine_patches.errors import Refusal, exit_refused

    try:
        _register()
    except Refusal as refusal:
        exit_refused(refusal)


def _register() -> None:
    from engine_patches import cpu_platform, serving
    from engine_patches import register as patch_register
    from engine_patches.backend_name import BACKEND

    if not _is_child():
        serving.hand_down(None)  # the user's environment has no say: only the flags do
    request = serving.inherited()
    if _is_child() and cpu_platform.activate() is not None:
        from engine_patches.cpu_platform.gdn import hooks

        hooks.install()
    patch_register.install_cli()
    _offer_backend(BACKEND)
    if request is not None:
        serving.start(request)
        patch_register.install_engine()


def _is_child() -> bool:
    """Whether SGLang started this process: the launching one reads the flags instead."""
    import multiprocessing

    return multiprocessing.parent_process() is not None


def _offer_backend(name: str) -> None:
    from sglang.srt.arg_groups.choices import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
    )
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    @register_attention_backend(name)
    def build(runner):
        from engine_patches.backend import RaggedAttentionBackend

        return RaggedAttentionBackend(runner)

    if name not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([name])
