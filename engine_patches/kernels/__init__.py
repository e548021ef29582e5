"""Attention kernels that the backend can run on: one class each, chosen by ``--kv-kernel``."""
