"""What a KV-cache policy is and exactly means: geometry, windows, retention, residency, artifacts.

Pure functions on numbers and arrays; importing it loads neither torch nor a serving engine.
"""
