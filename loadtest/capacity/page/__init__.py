"""``report.html``: on one screen what is gained and what is lost, then the figures behind it."""

from loadtest.capacity.page.document import render, write_report

__all__ = ["render", "write_report"]
