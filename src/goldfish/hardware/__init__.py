"""What serves the machine: GPU turns and rows, memory, a LeNet's layers as a CPU computes them."""
