"""Configuration of a training run, and the memory it needs: no torch, no numpy."""
