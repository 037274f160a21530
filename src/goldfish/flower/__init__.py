"""The engine across machines, the two apps that Flower loads, and what a client keeps on disk."""
