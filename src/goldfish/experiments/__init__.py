"""Experiments: a configuration, and the run that trains, deletes, unlearns and measures."""
