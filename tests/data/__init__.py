"""Tests of goldfish.data."""
