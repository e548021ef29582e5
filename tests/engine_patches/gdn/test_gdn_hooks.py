"""Where the torch replacements are put in place, and where they are not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine_patches import cpu_platform, plugin, register, serving
from engine_patches.cpu_platform.gdn import convolution, delta_rule, hooks

INSTALLED = """
import torch
from engine_patches.cpu_platform.gdn import hooks
from engine_patches.register import is_installed
hooks.install()
hooks.install()
from sglang.srt.layers.attention.linear import gdn_backend
from sglang.srt.layers.attention.linear.kernels import gdn_triton
assert all(map(is_installed, hooks.PATCHES))
states, weight = torch.zeros(1, 2, 3), torch.ones(2, 4)
print(gdn_backend.causal_conv1d_update(torch.ones(1, 2), states, weight).tolist())
q = torch.ones(1, 1, 1, 4)
gate = torch.zeros(1, 1, 1)
print(gdn_triton.chunk_gated_delta_rule(q, q, q, gate, gate)[0].tolist())
print(torch.ones(1, dtype=torch.bool).pin_memory().tolist(), torch.get_device_module().__name__)
"""


@pytest.mark.parametrize("patch", hooks.PATCHES, ids=lambda patch: patch.target.rsplit(".", 1)[1])
def test_targets_are_those_of_this_sglang(patch):
    register.check_target(patch)
    assert patch.why and patch.how and patch.until


def test_constants_are_those_of_this_sglang():
    from sglang.kernels.ops.attention.fla.chunk_delta_h import CHUNK_SIZE
    from sglang.kernels.ops.mamba.causal_conv1d_triton import PAD_SLOT_ID

    assert (delta_rule.CHUNK, convolution.PAD_SLOT_ID) == (CHUNK_SIZE, PAD_SLOT_ID)


@pytest.mark.parametrize(
    ("child", "platform", "installed"),
    [(True, cpu_platform.PLATFORM_CLASS, True), (True, None, False),
     (False, cpu_platform.PLATFORM_CLASS, False)],
    ids=["here", "where there is a GPU", "in the launching process"],
)  # fmt: skip
def test_only_in_servers_of_the_cpu_platform(monkeypatch, child, platform, installed):
    calls = []
    monkeypatch.setattr(hooks, "install", lambda: calls.append(1))
    monkeypatch.setattr(plugin, "_is_child", lambda: child)
    monkeypatch.setattr(cpu_platform, "activate", lambda: platform)
    monkeypatch.setattr(serving, "hand_down", lambda request: None)
    monkeypatch.setattr(serving, "inherited", lambda: None)
    plugin._register()
    assert bool(calls) is installed


def test_reach_the_modules_that_call_them():
    """SGLang's layers use them however they imported them; installing twice changes nothing."""
    ran = subprocess.run([sys.executable, "-c", INSTALLED], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.splitlines()[-3:] == ["[[1.0, 1.0]]", "[[[[0.0, 0.0, 0.0, 0.0]]]]",
                                            "[True] torch.cpu"]  # fmt: skip
