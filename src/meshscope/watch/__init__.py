"""`meshscope watch`: a run in the terminal while it is recorded."""
