"""The page that people look at: one JSON document of a run, and the file that shows it."""
