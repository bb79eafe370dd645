"""Pipeline stages, bubbles and handovers."""
