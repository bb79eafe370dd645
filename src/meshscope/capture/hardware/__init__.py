"""What the driver says of the devices while a job runs: clocks, power, heat, errors."""
