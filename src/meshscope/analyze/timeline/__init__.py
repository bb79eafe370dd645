"""All ranks' time cut into pieces, on one clock, without gaps."""
