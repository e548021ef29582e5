"""The self-contained HTML report of a calibrated policy: one input record, one function."""

from calib_cluster.report.data import ReportInput
from calib_cluster.report.page import render_report

__all__ = ["ReportInput", "render_report"]
