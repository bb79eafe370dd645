"""A model's size, arithmetic and the device's peak."""
