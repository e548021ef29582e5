"""Rewards of retention actions: what a frozen prompt costs its continuation (eq. 2 of CompilerKV).

A prompt is prefilled once; each draw of head weights and thresholds is turned into kept sets by
``kvpolicy.retention`` and scored on the same continuation, reading only what it kept.
"""
