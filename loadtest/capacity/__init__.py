"""Largest batch and longest context of several servers on the same KV bytes, quality beside both.

``python -m loadtest max-batch`` and ``python -m loadtest max-context``.
"""
