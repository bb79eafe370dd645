"""What comes after gradients: norm, loss scale, optimizer."""
