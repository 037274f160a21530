"""What Flower loads, what a client keeps on its disk, and how to deploy it all."""
