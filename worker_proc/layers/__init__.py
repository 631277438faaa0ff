"""The layers that models are made of. They know shapes, dtypes and the checkpoint's names, and nothing of requests."""
