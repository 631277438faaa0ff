"""Starts the scheduler process: `python -m scheduler_proc --config FILE`."""

from common.child import run_child
from scheduler_proc.main import main

run_child("scheduler", main)
