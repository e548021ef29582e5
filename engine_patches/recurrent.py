"""Models with recurrent layers beside attention: what must hold before one is served.

SGLang would find these out later, or not at all: at the first snapshot of a state, in a traceback
while loading, or as memory that is gone.
"""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from engine_patches import cpu_platform
from engine_patches.errors import Refusal
from kvpolicy.geometry import ModelGeometry

SGLANG_INTERVAL = 4
"""SGLang takes every so many layers as full attention where the config names no interval."""


@dataclass(frozen=True)
class StateSlots:
    """SGLang's memory of recurrent states, which no policy changes.

    Fields: ``slot_bytes`` of one state (convolution and recurrent, every layer); ``slots`` there
    are; ``per_request`` slots that SGLang counts for a running request: its own, those it tracks
    snapshots in, and what its prefix is cached with.
    """

    slot_bytes: int
    slots: int
    per_request: int

    @property
    def max_requests(self) -> int:
        """Running requests that the slots suffice for."""
        return self.slots // self.per_request

    @property
    def request_bytes(self) -> int:
        """Bytes of state that a running request is counted with, whatever its length."""
        return self.slot_bytes * self.per_request


def state_slots(configurator) -> StateSlots | None:
    """What SGLang settled on; None without recurrent layers.

    Args:
        configurator: SGLang's KVCacheConfigurator, after it sized the states.
    """
    from sglang.srt.runtime_context import get_schedule

    config = configurator.mambaish_config
    if config is None:
        return None
    return StateSlots(
        slot_bytes=config.mamba2_cache_params.mamba_cache_per_req,
        slots=get_schedule().max_mamba_cache_size,
        per_request=configurator._calculate_mamba_ratio(),
    )


def check_launch(args: Namespace, geometry: ModelGeometry, folder: str) -> None:
    """Refuse flags and configs, in the launching process.

    Args:
        args: SGLang's flags as given.
        geometry: with recurrent layers.
        folder: of the model's ``config.json``.

    Raises:
        Refusal: naming the flag or key, and what to write instead.
    """
    uncached = bool(getattr(args, "disable_radix_cache", False))
    if not uncached and getattr(args, "mamba_radix_cache_strategy", None) == "no_buffer":
        raise Refusal(
            "--mamba-radix-cache-strategy no_buffer does not work with --kv-policy; drop it: "
            "it needs pages of one token"
        )
    bound = args.max_mamba_cache_size or (uncached and args.max_running_requests)
    if not bound and cpu_platform.activate() is not None:
        raise Refusal(
            "give --max-mamba-cache-size: without it SGLang spends nearly half of the machine's "
            f"memory on recurrent states (about {geometry.state_bytes_per_request()} bytes each)"
        )
    _check_interval(geometry, folder)


def _check_interval(geometry: ModelGeometry, folder: str) -> None:
    raw = json.loads((Path(folder) / "config.json").read_bytes())
    text = raw.get("text_config") or raw
    if text.get("full_attention_interval") is not None:
        return
    full = [layer.layer_id for layer in geometry.attention_layers]
    taken = list(range(SGLANG_INTERVAL - 1, len(geometry.layers), SGLANG_INTERVAL))
    if full != taken:
        raise Refusal(
            f"config.json has full attention in layers {full} by layer_types, which SGLang does "
            f"not read: without full_attention_interval it takes layers {taken}; add that key"
        )


def check_configurator(configurator, geometry: ModelGeometry) -> None:
    """Refuse what only SGLang can tell, where its pools are built.

    Args:
        configurator: SGLang's KVCacheConfigurator of a model with recurrent layers.

    Raises:
        Refusal: SGLang takes other layers as full attention, or a convolution state's dtype is
            not the model's, which would end the server at the first snapshot.
    """
    config, model = configurator.mambaish_config, configurator.model_config
    full = [layer.layer_id for layer in geometry.attention_layers]
    if list(config.full_attention_layer_ids) != full:
        raise Refusal(
            f"SGLang takes layers {list(config.full_attention_layer_ids)} as full attention, "
            f"config.json says {full}; not supported"
        )
    conv, dtype = config.mamba2_cache_params.dtype.conv, model.dtype
    if conv != dtype:
        name = str(dtype).removeprefix("torch.")
        raise Refusal(
            f"the model runs in {name} (--dtype), its convolution states are "
            f"{str(conv).removeprefix('torch.')}: the first snapshot of one would fail; "
            f"set SGLANG_MAMBA_CONV_DTYPE={name}, or --dtype to match"
        )
