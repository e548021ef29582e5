"""Measures how surprising a prompt's observed end is: the retention gate's second coordinate."""

from sglang.srt.plugins.hook_registry import HookType

from engine_patches import serving
from engine_patches.patches.patch import Patch


def forward(original, self, input_ids, hidden_states, lm_head, logits_metadata, *args, **kwargs):
    served = serving.current()
    if served is not None and served.freezer is not None and served.plan is not None:
        from engine_patches.loss import observe_losses

        observe_losses(self, served.plan, hidden_states, lm_head, logits_metadata)
    return original(self, input_ids, hidden_states, lm_head, logits_metadata, *args, **kwargs)


PATCHES = (
    Patch(
        target="sglang.srt.layers.logits_processor.LogitsProcessor.forward",
        parameters=(
            "self",
            "input_ids",
            "hidden_states",
            "lm_head",
            "logits_metadata",
            "aux_hidden_states",
            "hidden_states_before_norm",
        ),
        hook=forward,
        kind=HookType.AROUND,
        why="prefill computes logits of the last position only; the gate needs the last 64",
        how="reads the hidden states of the observed positions before they are pruned",
        until="a plugin can ask for the logits of chosen prompt positions",
    ),
)
