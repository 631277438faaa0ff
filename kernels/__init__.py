"""Triton kernels, each beside its torch reference. Imports none of the other rooms; only `worker_proc` imports it."""
