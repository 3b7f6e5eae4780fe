"""The command line of Penstock."""

__version__ = "0.1.0"
