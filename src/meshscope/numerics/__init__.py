"""Statistics that know nothing of training: arrays in, numbers out."""
