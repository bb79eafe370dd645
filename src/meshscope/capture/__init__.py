"""Runs inside the training process: standard library and torch only, nothing else may be needed.

`recorder` is the public face; `timeline` turns enter/leave calls into records; `automatic` calls
them from torch's hooks; all errors of ours end in `guard`.
"""
