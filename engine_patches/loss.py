"""Loss of a prompt's observed tokens, R_sem of CompilerKV's equation 7."""

from __future__ import annotations

from sglang.srt.layers.logits_processor import LogitsMetadata
from torch.nn.functional import cross_entropy

from engine_patches.plan import DecodePlan, ExtendPlan


def observe_losses(processor, plan: ExtendPlan | DecodePlan, hidden_states, lm_head, metadata):
    """Add the losses of the batch's observed tokens to their freezes.

    Args:
        processor: SGLang's LogitsProcessor of the model.
        hidden_states: [tokens of the batch, hidden], before pruning.
        metadata: LogitsMetadata, or the ForwardBatch it is made from.

    Side effect: adds to ``nll_sum`` and ``nll_count`` of each freeze.
    """
    if not isinstance(plan, ExtendPlan) or not any(plan.observed):
        return
    if not isinstance(metadata, LogitsMetadata):
        metadata = LogitsMetadata.from_forward_batch(metadata)
    begin = 0
    for chunk, length in zip(plan.observed, plan.lengths, strict=True):
        a, b = chunk.losses if chunk is not None else (0, 0)
        if b > a and chunk.freeze.measures_loss:
            states = hidden_states[begin + a : begin + b]
            logits = processor._get_logits(states, lm_head, metadata, use_logits_buffer=False)
            logits = logits[:, : processor.config.vocab_size].float()
            chunk.freeze.add_loss(cross_entropy(logits, chunk.targets, reduction="none"))
        begin += length
