"""The self-contained HTML report of compiled retention tables: one input record, one function."""

from calib_cluster.report.retention.data import RetentionReportInput
from calib_cluster.report.retention.page import render_retention_report

__all__ = ["RetentionReportInput", "render_retention_report"]
