"""Where alarms and numbers of a run go to: one module each, loaded when asked for."""
