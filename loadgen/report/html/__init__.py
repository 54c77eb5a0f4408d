"""`write_report`: observed beside predicted as one HTML file that needs no network, with
picture, CSV and JSON beside it.
"""

from __future__ import annotations

from kendall.loadgen.report.html.data import ReportData, of_cells, of_files, of_folder
from kendall.loadgen.report.html.files import write_csv, write_json, write_report

__all__ = [
    "ReportData",
    "of_cells",
    "of_files",
    "of_folder",
    "write_csv",
    "write_json",
    "write_report",
]
