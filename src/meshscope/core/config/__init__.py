"""What a training run is told, as values, and the memory it needs: no torch, no numpy."""
