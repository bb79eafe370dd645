"""The same work on many files or ranks: on the cores of this machine, or on a cluster's workers."""
