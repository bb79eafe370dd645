"""What a training run is told: values, their file, what is wrong with them, what they need."""
