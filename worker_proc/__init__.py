"""The worker, one process per GPU: runs the model, the kernels and the CUDA Graphs, and schedules nothing."""
