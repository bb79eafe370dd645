"""The exception tree. Every message says what was found, what was expected and what to do.

MeshscopeError
├── UsageError        a flag, argument or configuration value is wrong            (exit 2)
├── LayoutError       degrees, ranks and the launcher's environment do not agree  (exit 2)
├── RunError          a run directory cannot be read                              (exit 3)
│   ├── RunNotFound     nothing there, or it is not a run
│   ├── RunEmpty        a run directory in which no rank has recorded anything
│   └── SchemaTooNew    written by a later meshscope
├── StorageError      a URL cannot be read or written                             (exit 3)
│   └── StorageNeedsPackage  fsspec lacks the package for this kind of URL        (exit 4)
├── TraceError        a trace, or another tool's file, cannot be read             (exit 3)
└── CaptureError      the recorder could not be set up (never raised into training)
"""


class MeshscopeError(Exception):
    """Base of all errors raised on purpose; the command line exits with `exit_code`."""

    exit_code = 1


class UsageError(MeshscopeError):
    """A flag, argument or configuration value is wrong."""

    exit_code = 2


class LayoutError(MeshscopeError):
    """Degrees, ranks and the launcher's environment do not agree."""

    exit_code = 2


class RunError(MeshscopeError):
    """A run directory cannot be read."""

    exit_code = 3


class RunNotFound(RunError):
    """Nothing is there, or what is there is not a run."""


class RunEmpty(RunError):
    """A run directory in which no rank has recorded anything."""


class SchemaTooNew(RunError):
    """The run was written by a later version of meshscope."""


class StorageError(MeshscopeError):
    """A URL, or what is there, cannot be read or written."""

    exit_code = 3


class StorageNeedsPackage(StorageError):
    """fsspec lacks the package for this kind of URL."""

    exit_code = 4


class TraceError(MeshscopeError):
    """A trace, or another tool's file, cannot be read."""

    exit_code = 3


class CaptureError(MeshscopeError):
    """The recorder could not be set up. Logged and counted, never raised into training."""
