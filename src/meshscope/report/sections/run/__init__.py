"""Sections of the report of one run, in the order of `report.contents`."""
