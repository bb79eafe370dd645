"""The run store: append-only, checksummed record files per rank and attempt, read as columns.

`schema` says what every number on disk means; `table_file`, `journal` and `writer` write it with
the standard library alone; `reader`, `query` and `compact` read it with numpy and DuckDB.
"""
