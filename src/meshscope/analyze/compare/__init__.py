"""Two runs or two sets of traces beside each other."""
