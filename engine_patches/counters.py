"""What a serving process has done with its policy so far."""

from __future__ import annotations

import msgspec


class Counters(msgspec.Struct):
    """Running totals since start-up (requests, batches, tokens, audits).

    ``page_reads`` counts when page ids were read from the device, which waits for it.
    ``freeze_kept_tokens`` of ``freeze_prompt_tokens`` is a mean over the kv heads that freeze.
    """

    admitted: int = 0
    prefill_batches: int = 0
    decode_batches: int = 0
    prefix_hits: int = 0
    prefix_hits_shortened: int = 0
    hit_tokens_given_up: int = 0
    retractions: int = 0
    page_reads: int = 0
    freezes: int = 0
    freeze_prompt_tokens: int = 0
    freeze_kept_tokens: int = 0
    audits: int = 0
    audit_faults: int = 0
