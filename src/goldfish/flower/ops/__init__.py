"""Operate a federation on Flower: keys, a deployment as child processes, checks."""
