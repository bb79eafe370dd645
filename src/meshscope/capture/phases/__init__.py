"""Phases beside the training loop's own: compilation and checkpoints, seen in torch itself."""
