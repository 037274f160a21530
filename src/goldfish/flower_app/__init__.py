"""The apps that Flower loads, and what a client keeps on its disk."""
