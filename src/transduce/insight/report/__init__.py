from transduce.insight.report.page import REPORT, report_of, with_report, write_report

__all__ = ["REPORT", "report_of", "with_report", "write_report"]
