"""How a client trains: batches, one SGD step, CUDA graphs of steps, the loop, the workspace."""
