"""Where the wall clock went."""
