"""Calibration of KV-cache policies: corpora, capture, SeqCalib, and the Ray service around them."""
