"""Load tests and demo models for RaggedKV servers (``python -m loadtest --help``)."""
