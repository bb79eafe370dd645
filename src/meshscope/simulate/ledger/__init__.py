"""Where the time between the measured step and the best one of these ranks goes."""
