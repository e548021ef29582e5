"""The CPU platform: offered only where SGLang has no device of its own."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

import pytest
import torch

from engine_patches import cpu_platform


@pytest.fixture
def bare_machine(monkeypatch):
    """No accelerator and no choice made in the environment."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)


@pytest.fixture
def platform():
    module, name = cpu_platform.PLATFORM_CLASS.split(":")
    return getattr(importlib.import_module(module), name)()


def test_offered_on_a_bare_machine(bare_machine):
    assert cpu_platform.activate() == cpu_platform.PLATFORM_CLASS


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_withdraws_where_there_is_an_accelerator(bare_machine, monkeypatch, device):
    monkeypatch.setattr(getattr(torch, device), "is_available", lambda: True)
    assert cpu_platform.activate() is None


def test_withdraws_for_the_cpu_engine_of_sglang(bare_machine, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert cpu_platform.activate() is None
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "0")
    assert cpu_platform.activate() == cpu_platform.PLATFORM_CLASS


def test_is_the_installed_entry_point():
    offered = {e.name: e for e in entry_points(group="sglang.srt.platforms")}
    assert offered["raggedkv_cpu"].load() is cpu_platform.activate


def test_sglang_takes_it_as_a_platform(platform):
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import SRTPlatform

    assert isinstance(platform, SRTPlatform)
    assert platform._enum is PlatformEnum.OOT
    assert platform.is_out_of_tree() and not platform.is_cuda_alike()


def test_claims_no_capability(platform):
    """Every capability SGLang knows, so that one that a later release turns on is noticed."""
    import msgspec

    claimed = {k: v for k, v in msgspec.structs.asdict(platform.capabilities).items() if v}
    assert claimed == {}
    assert platform.get_dispatch_key_name() == "native"


def test_recurrent_layers_keep_the_default_prefix_strategy(platform):
    """Without it SGLang falls back to pages of one token and no overlap."""
    assert platform.support_mamba_cache_extra_buffer()


def test_names_a_backend_that_needs_no_kernels(platform):
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    assert platform.get_default_attention_backend() == "torch_native"
    assert "torch_native" in ATTENTION_BACKENDS


@pytest.mark.parametrize(("given", "used"), [(None, "cpu"), ("cpu", "cpu"), ("cuda", "cuda")])
def test_fills_in_a_device_only_where_none_is_given(platform, given, used):
    from types import SimpleNamespace

    args = SimpleNamespace(device=given)
    platform.apply_server_args_defaults(args)
    assert args.device == used


def test_memory_is_the_machines(platform):
    import psutil

    assert platform.get_device_total_memory() == psutil.virtual_memory().total
