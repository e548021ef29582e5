"""Test helpers: a masked Hugging Face reference, a served engine, and natural prompts."""
