"""The scheduler process: decides who runs in the next step and where its KV lives. CPU only; imports no torch."""
