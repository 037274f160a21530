"""The version, for the package and for the results that it writes."""

__version__ = "0.1.0"
