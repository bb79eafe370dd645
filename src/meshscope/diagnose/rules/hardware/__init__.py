"""Rules about the machines: devices and the links between them."""
