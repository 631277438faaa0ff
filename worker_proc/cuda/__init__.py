"""The worker on a GPU: fused forward pass, CUDA Graphs, device state of the slots, staging and reporting of steps."""
