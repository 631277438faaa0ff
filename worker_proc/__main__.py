"""`python -m worker_proc --config FILE --rank N`: one worker, started by the supervisor."""

from common.child import run_child
from worker_proc.main import main

if __name__ == "__main__":
    run_child("worker", main)
