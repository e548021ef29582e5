"""Masked-free ragged attention over pages that belong to one KV head each."""
