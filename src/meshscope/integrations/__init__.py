"""For frameworks' own extension points: a callback, a tracker. Each module needs its framework.

They add names (epochs, logged values, settings, evaluation) to the one recording of a process,
which they start if nobody has.
"""
