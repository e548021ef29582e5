"""The tests' masked reference is the one ``loadtest`` ships."""

from loadtest.reference import KeyRule, MaskedReference, Mismatch, _masked_attention

__all__ = ["KeyRule", "MaskedReference", "Mismatch", "_masked_attention"]
