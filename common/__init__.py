"""What crosses a process boundary, and nothing else: configuration, messages, sockets, sampling parameters, logging.

Imports no torch, no transformers, no numpy, and none of the other rooms. Every other room imports this one.
"""
