"""What a trace says of a device: time, kernels, operators, rates."""
