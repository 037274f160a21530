"""What serves the machine: GPU turns and rows, memory, layers as a CPU or a GPU computes them."""
