"""One rank: its steps, phases, signals and rates."""
