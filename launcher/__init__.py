"""The supervisor and its commands: starts the processes, watches them, stops them; what `launch.py` runs.

Imports common, and the client SDK for the commands that talk to an engine; none of the other rooms, and no torch.
"""
